"""``tpukern port``: what ties a project to CUDA, and what does the same on the tpu device."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from tpukern.cli.output import Output, json_option
from tpukern.errors import ConfigError
from tpukern.porting import Finding, Report, patch, read

HEADINGS = ("where", "kind", "found", "status", "what to do")


@click.command("port")
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--write", "patch_path", metavar="PATCH", type=click.Path(path_type=Path), help="Write the mechanical edits there."
)
@json_option
@click.pass_obj
def port_command(output: Output, path: Path, patch_path: Path | None) -> int:
    """Say what ties the project at PATH to CUDA: packages of kernels, CUDA and Triton sources, guards, devices.

    Nothing of the project is imported or run. The exit status is 0 if nothing was found, else 1. The edits of --write are a
    patch for 'git apply' in PATH: devices, guards, and calls of torch.cuda that torch.accelerator has.
    """
    report = read(path)
    if patch_path is not None:
        _write(output, report, patch_path)
    if output.as_json:
        output.json(as_json(report))
    else:
        _table(output, report)
    return 1 if report.findings else 0


def as_json(report: Report) -> dict[str, Any]:
    """Returns what ``port --json`` says."""
    findings = [dataclasses.asdict(f) for f in report.findings]
    for finding in findings:
        del finding["edit"]
    summary = {"edit": report.count("edit"), "by hand": report.count("by hand"), "uncovered": report.count("uncovered")}
    return {"files": report.files, "summary": summary, "findings": findings}


def _table(output: Output, report: Report) -> None:
    if report.findings:
        output.table(HEADINGS, [_cells(f) for f in report.findings])
    counts = f"{report.count('edit')} to edit, {report.count('by hand')} by hand, {report.count('uncovered')} not covered"
    output.note(f"{report.files} files read: {counts if report.findings else 'nothing ties them to CUDA'}.")


def _cells(f: Finding) -> tuple[str, ...]:
    return f"{f.path}:{f.line}", f.kind, f.what, f.status, "\n".join((f.change, *(f"Not covered: {a}." for a in f.arguments)))


def _write(output: Output, report: Report, path: Path) -> None:
    edits = patch(report)
    if not edits:
        output.note("Nothing can be edited mechanically: no patch is written.")
        return
    try:
        path.write_bytes(edits)
    except OSError as error:
        raise ConfigError("port", f"the patch {str(path)!r} cannot be written: {error.strerror}", "a writable path") from error
    output.note(f"{report.count('edit')} edits in {path}; in the project: git apply {path.absolute()}")
