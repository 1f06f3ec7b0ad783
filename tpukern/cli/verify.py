"""``tpukern verify``: kernels against their references, in the chip's arithmetic and memory, without a chip."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from tpukern.cli.names import find_kernels, find_targets
from tpukern.cli.output import Output, json_option

if TYPE_CHECKING:
    from tpukern.testing import Result, Verdict

HEADINGS = ("kernel", "property", "direction", "inputs", "result")
WORST = ("kernel", "result", "direction", "dtype", "worst ULP", "bound", "ATen's ULP")


@click.command("verify")
@click.argument("kernel")
@click.option("--examples", type=click.IntRange(min=0), default=80, show_default=True, help="Draw this many inputs a kernel.")
@click.option("--seed", type=int, default=0, show_default=True, help="Draw them from this seed.")
@click.option("--target", "targets", metavar="NAMES", help="Compile for these chips too: v5e,v6e,... or all.")
@click.option("--property", "properties", multiple=True, metavar="NAME", help="Ask this only; can be repeated.")
@json_option
@click.pass_obj
def verify_command(
    output: Output, kernel: str, examples: int, seed: int, targets: str | None, properties: tuple[str, ...]
) -> int:
    """Check KERNEL against its reference; no TPU is needed.

    KERNEL is the name of a kernel that ships (see 'tpukern list'), 'all' for every one of them, or a kernel of your
    own: FILE.py:NAME or MODULE:NAME. Inputs are drawn from the declaration: shapes round every block border, every
    element type, static argument and class of values. Outputs and gradients are compared with the reference in float64;
    dots and elementary functions are rounded as the chip does. See docs/verify.md for what is asked. Inputs that failed
    are kept in .tpukern/regressions and tried first the next time. The exit status is 0 if nothing was found.
    """
    chips = find_targets(targets) if targets else []
    kernels = find_kernels(kernel)
    from tpukern.testing import parity
    from tpukern.testing.repro import STORE

    verdicts = []
    for found in kernels:
        verdict = parity(found, examples=examples, seed=seed, targets=chips, properties=properties or None, store=STORE)
        verdicts.append(verdict)
        if not output.as_json:
            show(output, verdict)
    if output.as_json:
        output.json([verdict.json() for verdict in verdicts])
    elif len(verdicts) > 1:
        output.note(f"{sum(v.ok for v in verdicts)} of {len(verdicts)} kernels are right.")
    return 0 if all(verdict.ok for verdict in verdicts) else 1


def show(output: Output, verdict: "Verdict") -> None:
    """Writes what was asked and found, the largest errors, and every finding with its script."""
    output.table(HEADINGS, [cells(verdict, result) for result in verdict.results], right=("inputs",))
    if verdict.worst:
        output.text()
        output.table(WORST, list(worst_cells(verdict)), right=("worst ULP", "bound", "ATen's ULP"))
    for finding in verdict.findings:
        output.text(f"\nfound: {finding}")
        if finding.script:
            output.text(f"\n{finding.script}")
    from tpukern.testing.findings import WIDE

    for w in verdict.wide:
        found = f"the bound of {w.bound:g} ULP for {w.dtype} is wide: {w.output} errs by {w.ulps:.3g}, and nothing by more"
        output.note(f"{verdict.kernel}: {found}; expected at most {WIDE:g} times that. Lower its tolerance.")
    if verdict.unjudged:
        output.note(
            f"{verdict.kernel}: {verdict.unjudged}, so whether its results are right cannot be judged. "
            "Give the decorator reference=: the same in plain torch."
        )
    word = "right" if verdict.ok else "wrong" if verdict.findings else "not judged"
    output.note(f"{verdict.kernel} is {word}: {verdict.examples} examples, seed {verdict.seed}, {verdict.seconds:.0f} s.\n")


def cells(verdict: "Verdict", result: "Result") -> tuple[str, ...]:
    what = result.skipped or ("ok" if result.ok else f"{len(result.findings)} found")
    return verdict.kernel, result.property, result.direction, str(result.cases), what


def worst_cells(verdict: "Verdict") -> "Sequence[tuple[str, ...]]":
    return [
        (
            verdict.kernel, w.output, w.direction, w.dtype, f"{w.ulps:.3g}", f"{w.bound:g}",
            "-" if w.native is None else f"{w.native:.3g}",
        )
        for w in verdict.worst
    ]  # fmt: skip
