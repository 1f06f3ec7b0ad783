"""``tpukern mutate``: faults put into kernels, to see which of them ``tpukern verify`` finds."""

from typing import TYPE_CHECKING

import click

from tpukern.cli.names import find_kernels
from tpukern.cli.output import Output, json_option

if TYPE_CHECKING:
    from tpukern.testing.mutation import Outcome, Report

HEADINGS = ("kernel", "kind", "where", "fault", "state", "by", "seconds")


@click.command("mutate")
@click.argument("kernel")
@click.option("--seed", type=int, default=0, show_default=True, help="Choose faults and draw inputs from this seed.")
@click.option("--limit", type=click.IntRange(min=1), help="At most this many mutants a kernel.  [default: all]")
@click.option("--examples", type=click.IntRange(min=0), default=80, show_default=True, help="Draw this many inputs a mutant.")
@json_option
@click.pass_obj
def mutate_command(output: Output, kernel: str, seed: int, limit: int | None, examples: int) -> int:
    """Put faults into KERNEL and see which of them the verdict finds.

    KERNEL is named as for 'tpukern verify'. Each mutant has one fault: a mask dropped, a block fetched too early, an
    accumulator in bfloat16, and so on, wherever the kernel's source, its gradient's or their traced programs have room for
    it. The kernel itself stays as it is. Mutants that survive are either harmless or show what 'tpukern verify' cannot see.
    The exit status is 0 if none did.
    """
    kernels = find_kernels(kernel)
    from tpukern.testing.mutation import mutate

    def tell(outcome: "Outcome") -> None:
        by = f" by {outcome.property}" if outcome.property else ""
        output.note(f"{outcome.kernel}: {outcome.fault}: {outcome.state}{by}, {outcome.seconds:.1f} s")

    reports = [mutate(found, seed=seed, limit=limit, examples=examples, on_outcome=tell) for found in kernels]
    if output.as_json:
        output.json([{"kernel": k.name, **report.json()} for k, report in zip(kernels, reports, strict=True)])
    else:
        for found, report in zip(kernels, reports, strict=True):
            show(output, found.name, report)
    return 0 if all(not report.of("survived") for report in reports) else 1


def show(output: Output, name: str, report: "Report") -> None:
    """Writes every mutant and what became of it, the survivors, and the rate."""
    output.table(HEADINGS, [cells(o) for o in report.outcomes], right=("seconds",))
    for o in report.of("survived"):
        output.text(f"\nsurvived: {o.fault}: {o.what}.")
    counts = ", ".join(f"{len(report.of(state))} {state}" for state in ("caught", "refused", "equivalent", "survived"))
    output.note(
        f"{name}: {len(report.outcomes)} mutants of {len(report.kinds)} kinds: {counts}; {report.rate:.1%} of those that run "
        f"and are not equivalent were caught (seed {report.seed}, {report.examples} examples).\n"
    )


def cells(o: "Outcome") -> tuple[str, ...]:
    f = o.fault
    where = f.where if f.line is None else f"{f.where}:{f.line}"
    return o.kernel, f.kind, where, f.what, o.state, o.property or "-", f"{o.seconds:.1f}"
