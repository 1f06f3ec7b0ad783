"""``tpukern tune``: the best config of a kernel for a chip, found without one, and put on record."""

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpukern.cli.names import find_kernels, find_targets
from tpukern.cli.output import Output, json_option
from tpukern.cli.points import DIRECTIONS, Choice, chosen_directions, chosen_workloads, nothing
from tpukern.errors import TpukernError

if TYPE_CHECKING:
    from tpukern.autotune.trials import Trial
    from tpukern.autotune.tuning import Budget, Problem, State, Tuned, Tuner

HEADINGS = (
    "kernel", "direction", "workload", "target", "us", "default us", "faster", "source", "tried", "failed", "config",
)  # fmt: skip
RIGHT = ("us", "default us", "faster", "tried", "failed")
LEAST_S = 1.0  # of a time budget that is left for the last kernels


@click.command("tune")
@click.argument("kernel")
@click.option("--target", "targets", required=True, metavar="NAMES", help="Chips: v5e,v6e,... or all.")
@click.option("--workload", "workloads", multiple=True, metavar="NAME", help="A named workload; can be repeated. Default: all.")
@click.option("--shape", metavar="DIM=N,...", help="Sizes and static arguments, in place of a named workload.")
@click.option("--dtype", metavar="NAME", help="Element type, in place of the workload's own.")
@click.option("--direction", type=click.Choice(DIRECTIONS), help="One direction; without it both.")
@click.option(
    "--budget", metavar="BUDGET", help="Configs to try each (40), or a time for all (90s, 10m); default: small spaces whole."
)
@click.option(
    "--strategy", type=click.Choice(("auto", "exhaustive", "optuna")), default="auto", show_default=True,
    help="auto tries all of up to 64 configs, and leaves more to Optuna.",
)  # fmt: skip
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Compile this many at a time; default: one a core.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Seconds for one compile; else 120.")
@click.option("--memory", type=click.IntRange(min=1), metavar="MIB", help="Memory that a compile worker may hold.")
@click.option("--records", "folder", type=click.Path(path_type=Path), help="Where results go; default: the user's records.")
@click.option("--no-record", is_flag=True, help="Put nothing on record.")
@click.option("--fresh", is_flag=True, help="Try again what was tried before.")
@click.option("--device", is_flag=True, help="Measure on this machine's TPU in place of estimating.")
@json_option
@click.pass_obj
def tune_command(output: Output, kernel: str, targets: str, **options: Any) -> int:
    """Find the best config of KERNEL for TPUs; none is needed.

    KERNEL is the name of a kernel that ships (see 'tpukern list'), 'all' for every one of them, or a kernel of your
    own: FILE.py:NAME or MODULE:NAME. Configs compile in worker processes and are timed by running the compiler's schedule;
    the default config is always among them, the winner's results are checked, and it is put on record, which calls without a
    config then use: see docs/tune.md. Ctrl-C keeps what is done, and the same command goes on from there. The exit status
    is 0 if every search ended with a config on record.
    """
    return tune_points(output, kernel, targets, **options)


def tune_points(
    output: Output,
    kernel: str,
    targets: str,
    *,
    workloads: Sequence[str],
    shape: str | None,
    dtype: str | None,
    direction: str | None,
    budget: str | None,
    strategy: str,
    workers: int | None,
    timeout: float | None,
    memory: int | None,
    folder: Path | None,
    no_record: bool,
    fresh: bool,
    device: bool,
) -> int:
    """Tunes what the options chose, shows the results, and returns the exit status."""
    if workloads and shape is not None:
        raise click.UsageError("--workload and --shape exclude each other.")
    from tpukern.autotune.recording import Store
    from tpukern.autotune.tuning import Budget, Tuner

    limits = Budget.parse(budget)
    found = list(problems(kernel, targets, workloads or (None,), shape, dtype, direction))
    rows: list[dict[str, Any]] = []
    with Watching(output, total=len(found)) as watching:
        tuner = Tuner(
            workers=workers, timeout_s=timeout, memory_bytes=memory * 2**20 if memory else None, strategy=strategy,
            record=not no_record, store=Store(folder) if folder else None, fresh=fresh, watch=watching.watch,
            measure=on_device() if device else None,
        )  # fmt: skip
        try:
            with tuner:
                for problem in searched(found, limits, tuner, watching):
                    rows.append(problem)
        except KeyboardInterrupt:
            watching.stop()
            show(output, rows)
            done = f"{len(rows)} of {len(found)} searches ended"
            output.note(f"{done}; what was tried of the next is kept. The same command goes on from there.")
            raise
    show(output, rows)
    return 0 if all(row["error"] is None and (row["path"] is not None or no_record) for row in rows) else 1


def on_device() -> Any:
    """Returns what measures on this machine's TPU."""
    from tpukern.autotune.measuring import measure

    return measure


def problems(
    kernel: str, targets: str, names: Sequence[str | None], shape: str | None, dtype: str | None, direction: str | None
) -> "Iterator[Problem]":
    """Yields what the options chose, kernel by kernel."""
    from tpukern.autotune.tuning import Problem

    kernels, chips = find_kernels(kernel), find_targets(targets)
    choices = [Choice(workload=name, shape=shape, dtype=dtype, direction=direction) for name in names]
    any_found = False
    for each in kernels:
        for choice in choices:
            for workload in chosen_workloads(kernels, choice)[each.name]:
                for way in chosen_directions(each, choice):
                    if way not in workload.directions:
                        continue
                    chosen = each.directions[way]
                    signature = chosen.workload_signature(workload)
                    any_found = True
                    yield from (
                        Problem(kernel=chosen, signature=signature, target=chip, workload=workload.name) for chip in chips
                    )
    if not any_found:
        raise nothing(kernels, kernels[0].name if len(kernels) == 1 else "all", choices[0])


def searched(
    found: "Sequence[Problem]", limits: "Budget", tuner: "Tuner", watching: "Watching"
) -> Iterator[dict[str, Any]]:
    """Tunes one problem after the other and yields the rows; a budget of time is shared among those that are left."""
    ends = None if limits.seconds is None else time.monotonic() + limits.seconds
    for place, problem in enumerate(found):
        deadline = None
        if ends is not None:
            left = max(ends - time.monotonic(), LEAST_S)
            deadline = time.monotonic() + left / (len(found) - place)
        watching.begin(problem)
        try:
            row = row_of(tuner.tune(problem, dataclasses.replace(limits, seconds=None), deadline), problem)
        except TpukernError as error:
            if error.stage == "compile":  # no libtpu, no worker: the next would fail likewise
                raise
            row = failed_row(problem, error)
        watching.end(row)
        yield row


def row_of(tuned: "Tuned", problem: "Problem") -> dict[str, Any]:
    """Returns one line of the result, as JSON has it."""
    return tuned.as_json() | {"error": None, "kernel": problem.kernel.name}


def failed_row(problem: "Problem", error: TpukernError) -> dict[str, Any]:
    return {
        "kernel": problem.kernel.name,
        "direction": problem.direction,
        "workload": problem.workload,
        "target": problem.target.name,
        "path": None,
        "problem": None,
        "error": str(error),
    }


def show(output: Output, rows: Sequence[dict[str, Any]]) -> None:
    """Writes the table, and below it what went wrong."""
    if output.as_json:
        output.json(list(rows))
        return
    output.table(HEADINGS, [cells(row) for row in rows], right=RIGHT)
    for row in rows:
        where = f"{row['kernel']} {row['workload']} {row['target']}"
        if row["error"] is not None:
            output.text(f"\n{where}: failed: {row['error']}")
        elif row["problem"] is not None:
            output.text(f"\n{where}: not on record: {row['problem']}")
    good = [row for row in rows if row["error"] is None]
    kinds: dict[str, int] = {}
    for row in good:
        for kind, count in row["failures"].items():
            kinds[kind] = kinds.get(kind, 0) + count
    failures = f"; failed: {', '.join(f'{count} x {kind}' for kind, count in sorted(kinds.items()))}" if kinds else ""
    tried = sum(row["tried"] for row in good)
    output.note(f"{len(good)} of {len(rows)} tuned, {tried} configs tried{failures}.")
    if any(row["source"] != "measured" for row in good):
        output.note("Times are predicted, not measured.")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    names = (row["kernel"], row["direction"], row["workload"] or "-", row["target"])
    if row["error"] is not None:
        return *names, "-", "-", "-", "failed", "-", "-", "-"
    default, speedup = row["default_us"], row["speedup"]
    times = f"{row['us']:,.1f}", "-" if default is None else f"{default:,.1f}", "-" if speedup is None else f"{speedup:.2f}x"
    config = ",".join(f"{key}={value}" for key, value in row["config"].items())
    return *names, *times, row["source"], f"{row['tried']}", str(sum(row["failures"].values())), config


class Watching:
    """Progress: on a terminal's stderr two bars with the best so far and the time left; elsewhere a line a search."""

    def __init__(self, output: Output, *, total: int) -> None:
        self._output, self._total, self._ended = output, total, 0
        self._bar: Any = None

    def __enter__(self) -> "Watching":
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            columns = (
                progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn(),
                progress.TextColumn("left"), progress.TimeRemainingColumn(),
                progress.TextColumn("{task.description}", markup=False),
            )  # fmt: skip
            self._bar = progress.Progress(*columns, console=Console(file=sys.stderr), transient=True)
            self._bar.start()
            self._all = self._bar.add_task("", total=self._total)
            self._one = self._bar.add_task("", total=None)
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def begin(self, problem: "Problem") -> None:
        """Says what is searched now."""
        if self._bar is not None:
            name = f"{problem.kernel.name} {problem.workload or ''} {problem.target.name}"
            self._bar.reset(self._one, total=None, description="")
            self._bar.update(self._all, description=name, refresh=True)

    def watch(self, state: "State", trial: "Trial") -> None:
        """Counts one trial."""
        if self._bar is not None:
            best = "" if state.best is None else f"best {state.best.us:,.1f} us ({state.best.config})"
            failures = f", {state.failed} failed" if state.failed else ""
            name = f"{state.problem.kernel.name}: {best}{failures}"
            self._bar.update(self._one, completed=state.done, total=state.total, description=name, refresh=True)

    def end(self, row: dict[str, Any]) -> None:
        """Says how a search ended."""
        self._ended += 1
        if self._bar is not None:
            self._bar.update(self._all, advance=1, refresh=True)
            return
        name = f"{row['kernel']} {row['workload'] or ''} {row['target']}"
        said = "FAILED" if row["error"] is not None else said_of(row)
        self._output.note(f"[{self._ended}/{self._total}] {name}: {said}")


def said_of(row: dict[str, Any]) -> str:
    """Returns a line about a search that found something."""
    default = "the default fails" if row["default_us"] is None else f"default {row['default_us']:,.1f}"
    return f"{row['us']:,.1f} us, {default}, {row['tried']} configs in {row['seconds']:.0f} s"
