"""``tpukern estimate``: how long kernels take on chips that are not there."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from tpukern.cli.compile import Progress
from tpukern.cli.names import find_kernels, find_targets
from tpukern.cli.output import Output, json_option, mebibytes
from tpukern.cli.points import Choice, Point, choice_of, choice_options, points
from tpukern.errors import TpukernError

if TYPE_CHECKING:
    from tpukern.autotune.estimating import Estimate

HEADINGS = (
    "kernel", "direction", "workload", "dtype", "target",
    "us", "source", "bound by", "compute us", "HBM us", "MXU", "HBM", "VMEM MiB",
)  # fmt: skip
RIGHT = ("us", "compute us", "HBM us", "MXU", "HBM", "VMEM MiB")


@click.command("estimate")
@click.argument("kernel")
@click.option("--target", "targets", required=True, metavar="NAMES", help="Chips: v5e,v6e,... or all.")
@choice_options(one=False)
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Compile this many at a time; default: one a core.")
@json_option
@click.pass_obj
def estimate_command(output: Output, kernel: str, targets: str, workers: int | None, **chosen: str | None) -> int:
    """Predict how long KERNEL takes on TPUs; none is needed.

    KERNEL is the name of a kernel that ships (see 'tpukern list'), 'all' for every one of them, or a kernel of your
    own: FILE.py:NAME or MODULE:NAME. Every time is a prediction: source 'replay' runs the compiler's own schedule against a
    model of the memory; 'roofline' is a bound from below, where that cannot be had, and the reason is printed. See
    docs/estimate.md for what the predictions were held against. The exit status is 0 if every one has an estimate.
    """
    return estimate_points(output, kernel, targets, workers, choice_of(**chosen))


def estimate_points(output: Output, kernel: str, targets: str, workers: int | None, choice: Choice) -> int:
    """Estimates what the options chose, shows the results, and returns the exit status."""
    from tpukern.autotune.estimating import estimate_many
    from tpukern.compiling import Job

    chosen = points(find_kernels(kernel), find_targets(targets), choice)
    jobs = [
        Job(bound=point.bound, target=point.target, direction=point.direction, workload=point.workload.name)
        for point in chosen
        if point.bound is not None
    ]
    with Progress(output, total=len(jobs)) as progress:

        def step(index: int, found: "Estimate | TpukernError") -> None:
            job = jobs[index]
            failed = isinstance(found, TpukernError)
            said = "FAILED" if isinstance(found, TpukernError) else f"{found.us:,.1f} us ({found.source})"
            progress.count(f"{job.bound.kernel.name} {job.workload} {job.target.name}", said, failed=failed)

        results = iter(estimate_many(jobs, workers=workers, on_result=step))
    rows = [row_of(point, next(results) if point.bound is not None else point.error) for point in chosen]
    if output.as_json:
        output.json(rows)
    else:
        show_rows(output, rows)
    return 0 if all(row["error"] is None for row in rows) else 1


def row_of(point: Point, found: "Estimate | TpukernError | None") -> dict[str, Any]:
    """Returns one line of the result, as JSON has it."""
    row = {
        "kernel": point.kernel.name,
        "direction": point.direction,
        "workload": point.workload.name,
        "dtype": point.workload.dtype,
        "target": point.target.name,
        "error": None,
    }
    if found is None or isinstance(found, TpukernError):
        return row | {"error": str(found)}
    config = None if point.bound is None else dict(point.bound.config)
    return found.as_json() | row | {"config": config, "kernel": point.kernel.name}


def show_rows(output: Output, rows: Sequence[dict[str, Any]]) -> None:
    """Writes the table, and below it every gap and error once, with the rows that it concerns."""
    output.table(HEADINGS, [cells(row) for row in rows], right=RIGHT)
    notes: dict[str, list[str]] = {}
    for row in rows:
        where = f"{row['kernel']} {row['direction']} {row['workload']} {row['target']}"
        for text in row.get("gaps", ()) if row["error"] is None else (f"failed: {row['error']}",):
            notes.setdefault(text, []).append(where)
    for text, places in notes.items():
        more = f", and {len(places) - 1} more" if len(places) > 1 else ""
        output.text(f"\n{places[0]}{more}: {text}")
    output.note("Predicted, not measured.")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    names = (row["kernel"], row["direction"], row["workload"], row["dtype"], row["target"])
    if row["error"] is not None:
        return *names, "-", "failed", *("-",) * 6
    times = f"{row['compute_us']:,.1f}", f"{row['hbm_us']:,.1f}"
    shares = f"{row['mxu_share']:.0%}", f"{row['hbm_share']:.0%}"
    return *names, f"{row['us']:,.1f}", row["source"], row["bound_by"], *times, *shares, mebibytes(row["vmem_bytes"])
