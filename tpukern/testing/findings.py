"""What a verdict consists of: findings, results by property, and the whole."""

import builtins
import dataclasses
import math
from typing import Any, Final

from tpukern.errors import ParityError
from tpukern.testing.strategies import Case

WIDE: Final = 4.0  # times the measured worst: the most that a bound may be
MEASURED: Final = 2000  # examples: fewer say little of the worst

# In the order in which they are shown. Each is one question; a direction that a question has no meaning for is left out.
PROPERTIES: dict[str, tuple[str, ...]] = {
    "parity": ("forward", "backward"),
    "finite_difference": ("backward",),
    "configs_agree": ("forward", "backward"),
    "deterministic": ("forward", "backward"),
    "batch_invariant": ("forward",),
    "strides": ("forward", "backward"),
    "written_everywhere": ("forward", "backward"),
    "arithmetic": ("forward", "backward"),
    "semantics": ("forward", "backward"),
    "compiles": ("forward", "backward"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One way in which a kernel is wrong.

    Attributes:
        property: One of `PROPERTIES`.
        direction: `forward` or `backward`.
        what: What was found, in one sentence.
        case: The input, None if it does not depend on one.
        output: The result that is wrong, None if it is not one.
        ulps: How far it is off, None if that is not measured.
        bound: How far it may be off.
        got: What the kernel gave there.
        want: What the reference gave there.
        script: A program that shows it, empty if there is none.
    """

    property: str
    direction: str
    what: str
    case: Case | None = None
    output: str | None = None
    ulps: float | None = None
    bound: float | None = None
    got: float | None = None
    want: float | None = None
    script: str = ""

    @builtins.property
    def key(self) -> tuple[str, str, str | None]:
        """What makes two findings the same fault, as far as can be told."""
        return self.property, self.direction, self.output

    def __str__(self) -> str:
        where = f" On {self.case}." if self.case is not None else ""
        return f"{self.property} ({self.direction}): {self.what.rstrip('.')}.{where}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worst:
    """The largest error of one result, over all cases of an element type.

    Attributes:
        output: The result.
        direction: `forward` or `backward`.
        dtype: The element type of the calls.
        ulps: The error.
        bound: What it may be.
        native: The largest error of ATen in the same dtype, on the same inputs; None where ATen cannot compute it.
        case: The input.
    """

    output: str
    direction: str
    dtype: str
    ulps: float
    bound: float
    native: float | None = None
    case: Case | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one property in one direction.

    Attributes:
        property: One of `PROPERTIES`.
        direction: `forward` or `backward`.
        cases: How many inputs it was asked of.
        findings: The faults.
        skipped: Why it was not asked; empty if it was.
    """

    property: str
    direction: str
    cases: int
    findings: tuple[Finding, ...] = ()
    skipped: str = ""

    @builtins.property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is to be said of a kernel.

    Attributes:
        kernel: Its name.
        results: By property and direction.
        worst: The largest errors, by result and element type.
        examples: Inputs drawn.
        seed: What everything was drawn from.
        seconds: Wall time.
        unjudged: Why its results could not be judged; empty if they were.
    """

    kernel: str
    results: tuple[Result, ...]
    worst: tuple[Worst, ...]
    examples: int
    seed: int
    seconds: float
    unjudged: str = ""

    @builtins.property
    def findings(self) -> tuple[Finding, ...]:
        """All faults."""
        return tuple(finding for result in self.results for finding in result.findings)

    @builtins.property
    def ok(self) -> bool:
        """Whether the kernel is right, as far as was looked; False if its results could not be judged."""
        return not self.findings and not self.unjudged

    @builtins.property
    def wide(self) -> tuple[Worst, ...]:
        """The bounds that are more than four times the measured worst, each with its worst result; none below 2,000 examples.

        Results that share a bound are measured together: which of them comes closest to it is a matter of the inputs drawn.
        """
        shared: dict[tuple[str, float], Worst] = {}
        for worst in self.worst if self.examples >= MEASURED and self.ok else ():
            known = shared.setdefault((worst.dtype, worst.bound), worst)
            if worst.ulps > known.ulps:
                shared[worst.dtype, worst.bound] = worst
        return tuple(worst for worst in shared.values() if worst.bound > WIDE * worst.ulps)

    def check(self) -> None:
        """Raises the first finding.

        Raises:
            ParityError: There is one, or the kernel's results could not be judged.
        """
        for finding in self.findings:
            do = f"Reproduce it:\n\n{finding.script}" if finding.script else ""
            raise ParityError(self.kernel, str(finding).rstrip("."), do=do)
        if self.unjudged:
            do = "Give the decorator reference=: the same in plain torch."
            raise ParityError(self.kernel, self.unjudged, "one, for its results to be judged by", do)

    def json(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return {
            "kernel": self.kernel,
            "ok": self.ok,
            "unjudged": self.unjudged or None,
            "examples": self.examples,
            "seed": self.seed,
            "seconds": round(self.seconds, 2),
            "properties": [
                {
                    "property": r.property,
                    "direction": r.direction,
                    "ok": r.ok,
                    "cases": r.cases,
                    "skipped": r.skipped or None,
                    "findings": [_finding_json(f) for f in r.findings],
                }
                for r in self.results
            ],
            "worst": [
                {
                    "output": w.output,
                    "direction": w.direction,
                    "dtype": w.dtype,
                    "ulps": number(w.ulps),
                    "bound": w.bound,
                    "aten_ulps": number(w.native),
                    "case": None if w.case is None else str(w.case),
                }
                for w in self.worst
            ],
            "wide": [{"dtype": w.dtype, "bound": w.bound, "ulps": number(w.ulps), "output": w.output} for w in self.wide],
        }


def _finding_json(f: Finding) -> dict[str, Any]:
    return {
        "what": f.what,
        "case": None if f.case is None else str(f.case),
        "output": f.output,
        "ulps": number(f.ulps),
        "bound": f.bound,
        "got": number(f.got),
        "want": number(f.want),
        "script": f.script or None,
    }


def number(value: float | None) -> float | str | None:
    """Returns a number as JSON has it: NaN and Inf as text."""
    return value if value is None or math.isfinite(value) else str(value)
