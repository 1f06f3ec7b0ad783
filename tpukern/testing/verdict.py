"""The verdict on a kernel: every question, asked of inputs drawn from its declaration.

from tpukern.testing import parity
parity(my_kernel).check()
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, final

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.errors import FlakyFailure

from tpukern.dsl import Kernel
from tpukern.errors import ConfigError, did_you_mean
from tpukern.targets import Target
from tpukern.targets import target as target_named
from tpukern.testing import on_chip, repro, shrinking, strategies, strides
from tpukern.testing import properties as ask
from tpukern.testing.findings import PROPERTIES, Finding, Result, Verdict
from tpukern.testing.judging import References
from tpukern.testing.programs import one_torch_thread
from tpukern.testing.properties import Session
from tpukern.testing.strategies import Case, Point

EXAMPLES: Final = 80
_DRAWN: Final = ("parity", "finite_difference")  # what the drawn examples are asked
_NATIVE_CASES: Final = 12
_NEED_A_REFERENCE: Final = ("parity", "finite_difference", "configs_agree", "strides", "written_everywhere")
_NO_REFERENCE: Final = "it has no reference"


def parity(
    kernel: Kernel,
    *,
    examples: int = EXAMPLES,
    seed: int = 0,
    targets: Sequence[Target | str] = (),
    properties: Sequence[str] | None = None,
    directions: Sequence[str] = ("forward", "backward"),
    stop_at_first: bool = False,
    shrink: bool = True,
    scripts: bool = True,
    store: Path | None = None,
    shapes: int | None = None,
    timeout: float = 60.0,
    references: References | None = None,
) -> Verdict:
    """Judges a kernel.

    Args:
        kernel: For a gradient, its forward kernel is judged, in the direction `backward`. Without a reference, only what
            needs none is asked, and the verdict says that the kernel's results cannot be judged.
        examples: How many inputs are drawn. Time grows linearly with it.
        seed: The same seed gives the same inputs.
        targets: Chips to compile for; none leaves `compiles` out.
        properties: Which of `PROPERTIES` to ask; None for all.
        directions: `forward`, `backward` or both.
        stop_at_first: Whether to stop at the first finding.
        shrink: Whether to look for a smaller input that fails too.
        scripts: Whether a finding gets a program that shows it without this machinery.
        store: Folder of inputs that failed before: they are tried first, and new ones are added. None: there is none.
        shapes: How many shapes of each element type to compile; None derives it from `examples`.
        timeout: Seconds that one run may take.
        references: What the kernel's reference has said in other runs: it is not asked again.

    Returns:
        The verdict. Nothing is raised for what the kernel does wrong.

    Raises:
        ConfigError: There is no such property, direction or target.
    """
    if kernel.forward is not None:
        kernel, directions = kernel.forward, ("backward",)
    _check(kernel, PROPERTIES if properties is None else properties, directions)
    run = _Run(
        session=Session(kernel, directions, timeout, references),
        asked=tuple(PROPERTIES if properties is None else properties),
        examples=examples,
        seed=seed,
        targets=tuple(target_named(t) if isinstance(t, str) else t for t in targets),
        stop_at_first=stop_at_first,
        shrink=shrink,
        scripts=scripts,
        store=store,
    )
    began = time.monotonic()
    with one_torch_thread(), contextlib.closing(run.session.programs), contextlib.suppress(_Enough):
        run.all(shapes or max(5, min(24, examples // 20)))
    return run.verdict(time.monotonic() - began)


def _check(kernel: Kernel, properties: Iterable[str], directions: Iterable[str]) -> None:
    for name in properties:
        if name not in PROPERTIES:
            raise ConfigError(
                kernel.name, f"no property {name!r}", f"one of {list(PROPERTIES)}", did_you_mean(name, PROPERTIES)
            )
    for name in directions:
        if name not in ("forward", "backward"):
            raise ConfigError(kernel.name, f"no direction {name!r}", "'forward' or 'backward'")


def _same_fault(found: Finding, known: Finding) -> bool:
    """Whether a wrong result shows again in another property what is known from `parity`."""
    wrong = found.output is not None and found.output == known.output and found.ulps is not None
    return wrong and known.property == "parity"


class _Enough(Exception):
    """Ends a run at its first finding."""


class _Failed(Exception):
    """Tells Hypothesis that an example fails."""


@final
@dataclasses.dataclass(kw_only=True)
class _Run:
    session: Session
    asked: tuple[str, ...]
    examples: int
    seed: int
    targets: tuple[Target, ...]
    stop_at_first: bool
    shrink: bool
    scripts: bool
    store: Path | None
    findings: list[Finding] = dataclasses.field(default_factory=list)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)

    # --- bookkeeping

    def wants(self, name: str) -> bool:
        if name in _NEED_A_REFERENCE and self.session.kernel.reference is None:
            self.skipped[name] = _NO_REFERENCE
            return False
        return name in self.asked and any(d in PROPERTIES[name] for d in self.session.directions)

    def note(self, name: str, found: Finding | None, *, shrinkable: bool = False) -> None:
        """Counts an answer, and keeps a finding."""
        self.counts[name] = self.counts.get(name, 0) + 1
        if found is not None:
            self.keep(found, shrinkable=shrinkable)

    def keep(self, found: Finding, *, shrinkable: bool = False) -> None:
        """Keeps a finding, if it is a new fault."""
        if any(found.key == known.key or _same_fault(found, known) for known in self.findings):
            return
        if found.property in ("parity", "configs_agree") and found.output is not None:
            found = self.if_flaky(found)
            if found.property != "deterministic" and not ask.confirmed(self.session, found):
                return
        if shrinkable and self.shrink and found.case is not None:
            found = shrinking.shrunk(self.session, found)
        if self.scripts:
            found = dataclasses.replace(found, script=repro.script(self.session, found))
        self.findings.append(found)
        if self.store is not None:
            repro.keep(self.store, self.session.kernel, found)
        if self.stop_at_first:
            raise _Enough

    def if_flaky(self, found: Finding) -> Finding:
        """Returns the finding; if the kernel gives something else the next time, that instead."""
        assert found.case is not None
        flaky = ask.deterministic(self.session, found.case)
        return flaky if flaky is not None and flaky.property == "deterministic" else found

    def verdict(self, seconds: float) -> Verdict:
        results = []
        names = dict.fromkeys([*(n for n in PROPERTIES if n in self.asked), *(f.property for f in self.findings)])
        for name in names:
            blamed = [f.direction for f in self.findings if f.property == name]
            for direction in dict.fromkeys((*(d for d in PROPERTIES[name] if d in self.session.directions), *blamed)):
                own = tuple(f for f in self.findings if f.property == name and f.direction == direction)
                skipped = self.skipped.get(name, "") if not self.counts.get(name) else ""
                results.append(
                    Result(
                        property=name, direction=direction, cases=self.counts.get(name, 0), findings=own, skipped=skipped
                    )
                )  # fmt: skip
        worst = sorted(self.session.worst.values(), key=lambda w: (w.direction != "forward", w.output, w.dtype))
        return Verdict(
            kernel=self.session.kernel.name, results=tuple(results), worst=tuple(worst), examples=self.examples,
            seed=self.seed, seconds=seconds, unjudged=_NO_REFERENCE if self.session.kernel.reference is None else "",
        )  # fmt: skip

    # --- the stages

    def all(self, shapes: int) -> None:
        """Asks everything, what finds most soonest first."""
        kernel = self.session.kernel
        try:
            points = strategies.points(kernel, shapes, self.seed)
            rich = strategies.rich(kernel, self.seed)
            edge = strategies.just_above(kernel, self.seed)
        except Exception as error:
            self.note(
                "parity",
                ask.refused(self.session, Case(point=Point(dtype="", sizes=strategies.FrozenMapping())), "parity", error),
            )
            return
        self.replay()
        if any(self.may_hang(point) for point in rich[:1]):
            self.simulate(edge)
        if not self.stop_at_first and self.wants("parity"):
            self.session.programs.prepare([*rich, *edge, *points])
        for point in rich if self.wants("written_everywhere") else ():
            self.note("written_everywhere", on_chip.written_everywhere(self.session, Case(point=point, seed=self.seed)))
        self.values([Case(point=point, seed=self.seed) for point in rich])
        self.dots(rich)
        self.simulate(edge)
        self.values([Case(point=point, seed=self.seed) for point in points])
        self.same(edge, rich)
        self.draw(points)
        self.configs(rich)
        self.strided(edge)
        self.compile([*strategies.least(kernel, self.seed), *edge, *rich])

    def may_hang(self, point: Point) -> bool:
        try:
            return on_chip.may_hang(self.session, point)
        except Exception:  # it is reported by the question that comes next
            return False

    def replay(self) -> None:
        for case in repro.kept(self.store, self.session.kernel) if self.store is not None and self.wants("parity") else ():
            self.note("parity", ask.parity(self.session, case), shrinkable=True)

    def values(self, cases: Sequence[Case]) -> None:
        if not self.wants("parity"):
            return
        for at, case in enumerate(cases):
            found = ask.parity(self.session, case)
            self.note("parity", found, shrinkable=True)
            if found is None and at < _NATIVE_CASES and not case.point.empty:
                ask.native(self.session, case)

    def dots(self, rich: Sequence[Point]) -> None:
        if self.wants("arithmetic"):
            for point in rich:
                self.counts["arithmetic"] = self.counts.get("arithmetic", 0) + 1
                for found in on_chip.arithmetic(self.session, Case(point=point)):
                    self.keep(found)

    def simulate(self, edge: Sequence[Point]) -> None:
        """Runs the TPU interpreter, unless it was run already."""
        if not self.wants("semantics") or "semantics" in self.counts:
            return
        for point in edge:
            found = on_chip.semantics(self.session, Case(point=point, seed=self.seed))
            self.counts["semantics"] = self.counts.get("semantics", 0) + 1
            for finding in found:
                self.keep(finding)
            if any("hang in" in finding.what for finding in found):
                raise _Enough  # the other stages could not end it

    def same(self, edge: Sequence[Point], rich: Sequence[Point]) -> None:
        for at, point in enumerate(edge):
            case = Case(point=point, seed=self.seed)
            if self.wants("deterministic"):
                self.note("deterministic", ask.deterministic(self.session, case, again=at == 0))
            if self.wants("finite_difference"):
                self.smooth(case)
        for point in (*edge, *rich) if self.wants("batch_invariant") else ():
            for found in ask.batch_invariant(self.session, Case(point=point, seed=self.seed)):
                self.note("batch_invariant", found)

    def smooth(self, case: Case) -> None:
        try:
            self.note("finite_difference", ask.finite_difference(self.session, case))
        except Exception as error:
            self.note("finite_difference", ask.refused(self.session, case, "finite_difference", error))

    def draw(self, points: Sequence[Point]) -> None:
        """Lets Hypothesis draw cases, and shrink the first that fails."""
        if not self.wants("parity") or self.examples < 1:
            return
        filled = [p for p in points if not p.empty]
        self.session.programs.prepare(filled)
        last: list[Finding] = []

        @hypothesis.seed(self.seed)
        @hypothesis.settings(
            max_examples=self.examples, deadline=None, database=None, verbosity=Verbosity.quiet, print_blob=False,
            report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink) if self.shrink else (Phase.generate,),
        )  # fmt: skip
        @hypothesis.given(case=strategies.cases(self.session.kernel, filled))
        def agrees(case: Case) -> None:
            self.counts["parity"] = self.counts.get("parity", 0) + 1
            found = ask.parity(self.session, case)
            if found is not None and not any(found.key == known.key for known in self.findings):
                last[:] = [found]
                raise _Failed

        try:
            agrees()
        except (_Failed, FlakyFailure):
            self.note("parity", last[0], shrinkable=True)

    def configs(self, rich: Sequence[Point]) -> None:
        for at, point in enumerate(rich) if self.wants("configs_agree") else ():
            case = Case(point=point, seed=self.seed)
            for found in ask.configs_agree(self.session, case, count=2, seed=self.seed + at):
                self.note("configs_agree", found)

    def strided(self, edge: Sequence[Point]) -> None:
        if not self.wants("strides"):
            return
        if self.session.kernel.op is None:
            self.skipped["strides"] = "it has no torch op"
            return
        point = edge[self.seed % len(edge)]
        for found in strides.strides(self.session, Case(point=point, seed=self.seed)):
            self.note("strides", found)

    def compile(self, borders: Sequence[Point]) -> None:
        if not self.targets:
            self.skipped["compiles"] = "no target was named"
        elif self.wants("compiles"):
            for found in on_chip.compiles(self.session, borders, self.targets):
                self.note("compiles", found)
