"""How the verifier is judged: faults are put into a kernel, and the verdict has to find them.

    from tpukern.testing.mutation import mutate
    print(mutate(my_kernel).text())

The faults come from the kernel's source (`faults`) and from its traced programs (`traced_faults`). A mutant that nothing was
held against is not called right for that: it counts as a survivor, unless it is traced to the very same program as the kernel.
"""

import dataclasses
import functools
import importlib.util
import itertools
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from tpukern.dsl import Kernel
from tpukern.errors import ConfigError
from tpukern.testing import canonical, programs, strategies
from tpukern.testing.faults import Fault, Source, source_faults
from tpukern.testing.findings import Finding
from tpukern.testing.judging import Oracle, References, Told, bounds
from tpukern.testing.properties import CHIP
from tpukern.testing.strategies import Case, Point
from tpukern.testing.traced_faults import traced_faults, with_fault
from tpukern.testing.verdict import EXAMPLES, parity

CAUGHT, REFUSED, EQUIVALENT, SURVIVED = "caught", "refused", "equivalent", "survived"
_KEPT: Final = 32  # mutants whose programs JAX may keep
_SEEDS: Final = 4  # of the runs whose points tell whether a mutant is equivalent
_NUMBERS: Final = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one mutant.

    Attributes:
        kernel: The kernel.
        fault: What was done to it.
        state: `caught`; `refused` (it does not trace, or the declaration is not taken); `equivalent` (the same program as the
            kernel's, wherever they were compared); `survived`.
        property: Which property caught or refused it.
        what: What was found; of a survivor, how its results differ.
        seconds: Wall time.
    """

    kernel: str
    fault: Fault
    state: str
    property: str = ""
    what: str = ""
    seconds: float = 0.0

    def json(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        f = self.fault
        return {
            "kernel": self.kernel, "kind": f.kind, "where": f.where, "line": f.line, "direction": f.direction,
            "fault": f.what, "state": self.state, "property": self.property or None, "what": self.what,
            "seconds": round(self.seconds, 2),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What became of all mutants.

    Attributes:
        outcomes: One for each.
        examples: Inputs drawn for each.
        seed: What they were drawn from.
    """

    outcomes: tuple[Outcome, ...]
    examples: int
    seed: int

    def of(self, *states: str) -> tuple[Outcome, ...]:
        """Returns the outcomes in some state."""
        return tuple(o for o in self.outcomes if o.state in states)

    @property
    def rate(self) -> float:
        """The share of mutants that run and are not equivalent that was caught."""
        return _share(len(self.of(CAUGHT)), len(self.of(CAUGHT, SURVIVED)))

    @property
    def rate_with_refused(self) -> float:
        """The same, refused ones counted as caught."""
        return _share(len(self.of(CAUGHT, REFUSED)), len(self.of(CAUGHT, REFUSED, SURVIVED)))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of faults."""
        return tuple(sorted({o.fault.kind for o in self.outcomes}))

    @property
    def by_property(self) -> dict[str, int]:
        """How many each property caught."""
        return dict(Counter(o.property for o in self.of(CAUGHT)).most_common())

    def json(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return {
            "mutants": len(self.outcomes), "kinds": len(self.kinds), "examples": self.examples, "seed": self.seed,
            **{state: len(self.of(state)) for state in (CAUGHT, REFUSED, EQUIVALENT, SURVIVED)},
            "rate": round(self.rate, 4), "rate_with_refused": round(self.rate_with_refused, 4),
            "by_property": self.by_property, "seconds": round(sum(o.seconds for o in self.outcomes), 1),
            "outcomes": [o.json() for o in self.outcomes],
        }  # fmt: skip


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def faults(kernel: Kernel, *, seed: int = 0, limit: int | None = None) -> list[Fault]:
    """Returns the faults that a kernel has room for.

    Args:
        kernel: A kernel with a reference.
        seed: Which are taken if there are more than `limit`; every kind of every function has its turn before one has two.
        limit: How many at most.

    Raises:
        ConfigError: The kernel has no reference to be judged by.
    """
    if kernel.reference is None:
        raise ConfigError(kernel.name, "it has no reference", "one, for mutants to be judged by")
    found = [*source_faults(kernel), *traced_faults(kernel)]
    if limit is None or len(found) <= limit:
        return found
    order = np.random.default_rng(seed).permutation(len(found))
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for n in order:
        groups[found[n].kind, found[n].where].append(int(n))
    turns = itertools.zip_longest(*groups.values())
    chosen = [n for turn in turns for n in turn if n is not None][:limit]
    return [found[n] for n in sorted(chosen)]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tpukern-mutants-")


def mutant(kernel: Kernel, fault: Fault) -> Kernel:
    """Returns a kernel with a fault. The original stays as it is; no torch op is registered.

    Raises:
        Exception: Whatever the faulty module raises when it is imported.
    """
    if not fault.edits:
        return with_fault(kernel, fault)
    source = Source(kernel)
    path = Path(_folder().name) / f"{source.path.stem}_{next(_NUMBERS)}.py"
    path.write_bytes(source.edited(fault.edits))
    package = getattr(source.module, "__package__", "") or ""
    spec = importlib.util.spec_from_file_location(f"{package}.{path.stem}" if package else path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    made = getattr(module, kernel.fn.__name__)
    assert isinstance(made, Kernel)
    made.reference = kernel.reference  # which may share constants with the kernel
    return made


def forget(kernel: Kernel) -> None:
    """Drops the module that a mutant lives in, and now and then what JAX keeps of programs."""
    path = getattr(sys.modules.get(kernel.fn.__module__), "__file__", "") or ""
    if path.startswith(_folder().name):
        del sys.modules[kernel.fn.__module__]
    if next(_NUMBERS) % _KEPT == 0:
        jax.clear_caches()


def judge(
    kernel: Kernel,
    fault: Fault,
    *,
    seed: int = 0,
    examples: int = EXAMPLES,
    timeout: float = 60.0,
    references: References | None = None,
) -> Outcome:
    """Makes one mutant and asks for the verdict on it.

    Args:
        kernel: The kernel.
        fault: What to do to it.
        seed: Of the verdict.
        examples: Of the verdict.
        timeout: Seconds that one run of the mutant may take.
        references: What the kernel's reference has said for other mutants.
    """
    began = time.monotonic()

    def outcome(state: str, property: str = "", what: str = "") -> Outcome:
        seconds = time.monotonic() - began
        return Outcome(kernel=kernel.name, fault=fault, state=state, property=property, what=what, seconds=seconds)

    try:
        faulty = mutant(kernel, fault)
    except Exception as error:
        return outcome(REFUSED, "declaration", f"{type(error).__name__}: {error}")
    try:
        if _same_programs(kernel, faulty, seed):
            return outcome(EQUIVALENT, what=f"the same program at {len(_many_points(kernel, seed))} points")
        verdict = parity(
            faulty, seed=seed, examples=examples, stop_at_first=True, shrink=False, scripts=False, timeout=timeout,
            references=references,
        )  # fmt: skip
        if verdict.findings:
            found = verdict.findings[0]
            return outcome(REFUSED if _refused(found) else CAUGHT, found.property, str(found))
        return outcome(SURVIVED, what=difference(kernel, faulty, seed))
    finally:
        forget(faulty)


def _refused(found: Finding) -> bool:
    """Whether a mutant was not run at all: tracing it raised."""
    asked = ("parity", "written_everywhere", "configs_agree", "deterministic", "batch_invariant", "finite_difference")
    return found.property in asked and found.output is None and "still runs after" not in found.what


def _points(kernel: Kernel, seed: int) -> list[Point]:
    """Returns the points of a verdict."""
    return [*strategies.rich(kernel, seed), *strategies.just_above(kernel, seed), *strategies.points(kernel, 5, seed)]


@functools.lru_cache(maxsize=8)
def _many_points(kernel: Kernel, seed: int) -> tuple[Point, ...]:
    """Returns the points of several verdicts: what one of them does not reach is not equivalent for that."""
    other = [p for n in range(1, _SEEDS) for p in strategies.points(kernel, 8, seed + n)]
    return tuple(dict.fromkeys((*_points(kernel, seed), *other)))


def _same_programs(kernel: Kernel, other: Kernel, seed: int) -> bool:
    """Whether both are traced to the same programs, in both directions, at every point of several runs."""
    return all(_known_program(kernel, point) == _program(other, point) for point in _many_points(kernel, seed))


def _program(kernel: Kernel, point: Point) -> str:
    try:
        plan = programs.plan(kernel, point)
        return canonical.digest(jax.make_jaxpr(plan.function())(*plan.specs))
    except Exception as error:
        return canonical.without_places(f"{type(error).__name__}: {error}")


@functools.lru_cache(maxsize=256)
def _known_program(kernel: Kernel, point: Point) -> str:
    return _program(kernel, point)


def difference(kernel: Kernel, other: Kernel, seed: int) -> str:
    """Returns in words how the results of a mutant differ from the kernel's, on what can be told apart least: plain values."""
    compared, worst = 0, 0.0
    said = ""
    for point in (p for p in _points(kernel, seed) if not p.empty):
        case = Case(point=point, seed=seed)
        programs_of = [programs.Program(programs.plan(k, point), CHIP) for k in (kernel, other)]
        operands = programs_of[0].plan.operands(case)
        mine, others = (program.run(operands) for program in programs_of)
        told, promised = Told(programs_of[0].plan, operands), bounds(kernel)
        oracle = Oracle(told.plan, told, programs_of[0])
        backward = programs_of[0].plan.backward
        for o in (*programs_of[0].plan.signature.outputs, *(backward.outputs if backward else ())):
            compared += 1
            a, b = mine[o.name], others[o.name]
            if np.array_equal(a, b, equal_nan=True):
                continue
            errors = [e.ulps if e is not None else 0.0 for e in (oracle.judge(o, x, promised.of(o)) for x in (a, b))]
            share = errors[1] / promised.of(o)
            if share >= worst:
                worst = share
                said = f"{o.name} ({point.dtype}) is off by {errors[1]:.3g} ulp, the kernel's own by {errors[0]:.3g}"
                said += f"; the bound is {promised.of(o):g}"
    return said or f"bit for bit the kernel's own in {compared} results"


def judged(kernel: Kernel, chosen: Sequence[Fault], *, seed: int, examples: int = EXAMPLES) -> Iterator[Outcome]:
    """Yields the outcome of each fault."""
    references = References()
    for fault in chosen:
        yield judge(kernel, fault, seed=seed, examples=examples, references=references)


def mutate(
    kernel: Kernel,
    *,
    seed: int = 0,
    limit: int | None = None,
    examples: int = EXAMPLES,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> Report:
    """Judges the verifier by a kernel's mutants.

    Args:
        kernel: A kernel with a reference.
        seed: Of the choice of faults and of every verdict.
        limit: How many mutants at most; None for all.
        examples: Of every verdict.
        on_outcome: Called with each outcome as it comes.

    Raises:
        ConfigError: The kernel has no reference.
    """
    outcomes = []
    for outcome in judged(kernel, faults(kernel, seed=seed, limit=limit), seed=seed, examples=examples):
        outcomes.append(outcome)
        if on_outcome is not None:
            on_outcome(outcome)
    return Report(outcomes=tuple(outcomes), examples=examples, seed=seed)
