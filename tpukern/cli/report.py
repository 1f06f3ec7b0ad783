"""``tpukern report`` and ``tpukern trace``: predictions to look at."""

import json
from pathlib import Path

import click

from tpukern.cli.compile import Progress
from tpukern.cli.names import find_kernels, find_targets
from tpukern.cli.output import Output
from tpukern.cli.points import choice_of, choice_options, points
from tpukern.errors import ConfigError, TpukernError

DEFAULT_TARGETS = "v5e,v6e,v7x"


def write(path: Path, text: str) -> None:
    """Writes a file that the user named.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("tpukern", f"{path}: {error.strerror or error}", "a file that can be written") from error


@click.command("report")
@click.argument("kernels", nargs=-1)
@click.option("--target", "targets", default=DEFAULT_TARGETS, show_default=True, metavar="NAMES", help="Chips: v5e,... or all.")
@click.option("-o", "--output", "path", type=click.Path(path_type=Path, dir_okay=False), default=Path("report.html"),
              show_default=True, help="The page to write.")  # fmt: skip
@choice_options(one=False)
@click.pass_obj
def report_command(output: Output, kernels: tuple[str, ...], targets: str, path: Path, **chosen: str | None) -> int:
    """Write one page about KERNELS: times, rooflines, VMEM, grid steps and what was tuned.

    KERNELS are names as in 'tpukern estimate'; without any, every kernel that ships. The page needs no network. Every time in
    it is a prediction and says its source. The exit status is 0 if every point has an estimate.
    """
    from tpukern.autotune import drawing, reporting

    drawing.matplotlib()  # before minutes of compiles
    named = [kernel for name in kernels or ("all",) for kernel in find_kernels(name)]
    chosen_points = points(named, find_targets(targets), choice_of(**chosen))
    entries = [
        reporting.Entry(
            kernel=p.kernel.name,
            direction=p.direction,
            workload=p.workload.name,
            dtype=p.workload.dtype,
            target=p.target,
            bound=p.bound,
            found=p.error,
        )
        for p in chosen_points
    ]
    with Progress(output, total=2 * sum(e.bound is not None for e in entries)) as progress:

        def step(entry: reporting.Entry) -> None:
            failed = isinstance(entry.found, TpukernError)
            said = "FAILED" if entry.estimate is None else f"{entry.estimate.us:,.1f} us ({entry.estimate.source})"
            progress.count(f"{entry.kernel} {entry.workload} {entry.target.name}", said, failed=failed)

        reporting.collect(entries, step)
    write(path, reporting.page(entries))
    output.note(f"{path}: {len(entries)} points. Predicted, not measured.")
    return 0 if all(e.estimate is not None for e in entries) else 1


@click.command("trace")
@click.argument("kernel")
@click.option("--target", required=True, metavar="NAME", help="The chip.")
@click.option("-o", "--output", "path", type=click.Path(path_type=Path, dir_okay=False), default=Path("trace.json"),
              show_default=True, help="The trace to write.")  # fmt: skip
@choice_options(one=True)
@click.pass_obj
def trace_command(output: Output, kernel: str, target: str, path: Path, **chosen: str | None) -> int:
    """Write what KERNEL does when, as a trace that ui.perfetto.dev opens.

    Lanes: the operations of the program, bundles being issued, waits for transfers, HBM reads and writes. It is a replay of the
    compiler's schedule: predicted, not measured.
    """
    from tpukern.autotune.timeline import timeline

    found = find_targets(target)
    if len(found) != 1:
        raise click.UsageError("--target takes one chip.")
    point = points(find_kernels(kernel)[:1], found, choice_of(**chosen))[0]
    if point.error is not None:
        raise point.error
    line = timeline(point.bound, point.target)
    write(path, json.dumps(line.as_trace()))
    events = sum(len(op.events) for op in line.operations)
    where = f"{point.kernel.name} {point.direction} {point.workload.name} on {point.target.name}"
    output.note(f"{path}: {where}, {line.operations[-1].end_us:,.1f} us, {events:,} events. Predicted, not measured.")
    for gap in line.gaps:
        output.note(f"{gap}.")
    return 0
