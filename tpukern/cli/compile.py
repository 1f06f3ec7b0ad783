"""``tpukern compile``: kernels through the real TPU compiler, for any chip, on this machine."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from tpukern.cli.names import find_kernels, find_targets
from tpukern.cli.output import Output, json_option, mebibytes
from tpukern.cli.points import Choice, Point, choice_of, choice_options, points

if TYPE_CHECKING:
    from tpukern.compiling import Compiled

HEADINGS = ("kernel", "direction", "workload", "dtype", "target", "ok", "seconds", "VMEM MiB", "code MiB", "cached", "digest")
RIGHT = ("seconds", "VMEM MiB", "code MiB")


@click.command("compile")
@click.argument("kernel")
@click.option("--target", "targets", required=True, metavar="NAMES", help="Chips: v5e,v6e,... or all.")
@choice_options(one=False)
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Compile this many at a time; default: one a core.")
@json_option
@click.pass_obj
def compile_command(output: Output, kernel: str, targets: str, workers: int | None, **chosen: str | None) -> int:
    """Compile KERNEL for TPUs; none is needed.

    KERNEL is the name of a kernel that ships (see 'tpukern list'), 'all' for every one of them, or a kernel of your
    own: FILE.py:NAME or MODULE:NAME. Each direction, workload and target compiles by itself in a worker process; one
    that fails is reported and the others go on. What was compiled before is read from the cache. The exit status is 0
    if every one compiled.
    """
    return compile_points(output, kernel, targets, workers, choice_of(**chosen))


def compile_points(output: Output, kernel: str, targets: str, workers: int | None, choice: Choice) -> int:
    """Compiles what the options chose, shows the results, and returns the exit status."""
    from tpukern.compiling import Job, compile_many

    chosen = points(find_kernels(kernel), find_targets(targets), choice)
    jobs = [
        Job(bound=point.bound, target=point.target, direction=point.direction, workload=point.workload.name)
        for point in chosen
        if point.bound is not None
    ]
    with Progress(output, total=len(jobs)) as progress:
        results = iter(compile_many(jobs, workers=workers, on_result=progress.step))
    rows = [row_of(point, next(results) if point.bound is not None else None) for point in chosen]
    if output.as_json:
        output.json(rows)
    else:
        show_rows(output, rows)
    return 0 if all(row["ok"] for row in rows) else 1


def row_of(point: Point, compiled: "Compiled | None") -> dict[str, Any]:
    """Returns one line of the result, as JSON has it."""
    bound = point.bound
    return {
        "kernel": point.kernel.name,
        "direction": point.direction,
        "workload": point.workload.name,
        "dtype": point.workload.dtype,
        "target": point.target.name,
        "config": None if bound is None else dict(bound.config),
        "ok": compiled is not None and compiled.ok,
        "seconds": compiled.seconds if compiled is not None else 0.0,
        "vmem_bytes": compiled.vmem_bytes if compiled is not None else None,
        "code_bytes": compiled.code_bytes if compiled is not None else None,
        "digest": compiled.digest if compiled is not None else None,
        "cached": compiled is not None and compiled.cached,
        "error": compiled.error if compiled is not None else str(point.error),
    }


def show_rows(output: Output, rows: Sequence[dict[str, Any]]) -> None:
    """Writes the table, and below it every error in full."""
    output.table(HEADINGS, [cells(row) for row in rows], right=RIGHT)
    failed = [row for row in rows if not row["ok"]]
    for row in failed:
        where = f"{row['kernel']} {row['direction']} {row['workload']} {row['dtype']} {row['target']}"
        output.text(f"\nfailed: {where}\n{row['error']}")
    cached = sum(row["cached"] for row in rows)
    output.note(f"{len(rows) - len(failed)} of {len(rows)} compile; {cached} results from the cache.")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    names = (row["kernel"], row["direction"], row["workload"], row["dtype"], row["target"])
    sizes = (f"{row['seconds']:.2f}", mebibytes(row["vmem_bytes"]), mebibytes(row["code_bytes"]))
    return *names, "yes" if row["ok"] else "no", *sizes, "yes" if row["cached"] else "no", (row["digest"] or "-")[:12]


class Progress:
    """A bar on a terminal's stderr; a line a result where stderr is none."""

    def __init__(self, output: Output, *, total: int) -> None:
        self._output, self._total, self._done, self._failed = output, total, 0, 0
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            bar = (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn())
            name = progress.TextColumn("{task.description}", markup=False)
            self._bar = progress.Progress(*bar, name, console=Console(file=sys.stderr), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, compiled: "Compiled") -> None:
        """Counts one result."""
        how = "cached" if compiled.cached else f"{compiled.seconds:.2f} s"
        name = f"{compiled.kernel} {compiled.workload} {compiled.target}"
        self.count(name, f"{'ok' if compiled.ok else 'FAILED'}, {how}", failed=not compiled.ok)

    def count(self, name: str, said: str, *, failed: bool) -> None:
        """Counts one result of any kind."""
        self._done += 1
        self._failed += failed
        if self._bar is not None:
            failures = f" ({self._failed} failed)" if self._failed else ""
            self._bar.update(self._task, advance=1, description=f"{name}{failures}", refresh=True)
        else:
            self._output.note(f"[{self._done}/{self._total}] {name}: {said}")
