"""The questions of a verdict, one function each: a session and a case to findings."""

import dataclasses
import functools
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from tpukern.dsl import Kernel
from tpukern.errors import LowerError, ParityError, SignatureError, TpukernError
from tpukern.targets import target as target_named
from tpukern.testing import judging, programs, reference, strategies
from tpukern.testing.findings import Finding, Worst
from tpukern.testing.judging import Oracle, References
from tpukern.testing.programs import Plan, Program, Programs
from tpukern.testing.strategies import Case

CHIP: Final = target_named("v5e")  # whose arithmetic is applied: no chip but v4 rounds more coarsely
_STEPS: Final = (2.0**-13, 2.0**-14)  # of finite differences


class Session:
    """What the questions about one kernel share.

    Args:
        kernel: A forward kernel.
        directions: Which of `forward` and `backward` are asked about.
        timeout: Seconds that one run of a program, or one simulation, may take.
        references: What its reference has said already.

    Attributes:
        bounds: What the kernel promises.
        programs: Its compiled programs, with the arithmetic of `CHIP`.
        worst: The largest errors so far, by result and element type.
    """

    def __init__(
        self,
        kernel: Kernel,
        directions: Sequence[str] = ("forward", "backward"),
        timeout: float = 60.0,
        references: References | None = None,
    ) -> None:
        self.kernel, self.timeout, self.references = kernel, timeout, references or References()
        self.directions = tuple(d for d in directions if d in kernel.directions)
        self.bounds = judging.bounds(kernel)
        self.gradient = "backward" in self.directions
        self.programs = Programs(kernel, CHIP, gradient=self.gradient, timeout=timeout)
        self.worst: dict[tuple[str, str], Worst] = {}

    def direction_of(self, plan: Plan, name: str) -> str:
        """Returns the direction that a result belongs to."""
        return "forward" if name in {o.name for o in plan.signature.outputs} else "backward"

    def results_of(self, plan: Plan) -> list[Any]:
        """Returns the results of a plan in the directions asked about."""
        backward = () if plan.backward is None else plan.backward.outputs
        return [o for o in (*plan.signature.outputs, *backward) if self.direction_of(plan, o.name) in self.directions]


def refused(session: Session, case: Case, name: str, error: Exception) -> Finding | None:
    """Returns what an exception on the way to a result means; None if it is allowed to the kernel."""
    point = case.point
    if point.empty and isinstance(error, SignatureError | ParityError):
        return None  # sums over nothing are the reference's
    if isinstance(error, LowerError) and "states" in error.found:
        return Finding(property="arithmetic", direction=_blamed(session, error), what=str(error), case=case)
    if isinstance(error, TpukernError):
        return Finding(property=name, direction=_blamed(session, error), what=str(error), case=case)
    last = traceback.extract_tb(error.__traceback__)
    at = next((f"{f.name}, line {f.lineno}" for f in reversed(last) if f.filename in _own_files(session.kernel)), "")
    what = f"it raises {type(error).__name__}{f' in {at}' if at else ''}: {_first_line(error)}"
    return Finding(property=name, direction=_blamed(session, error), what=what, case=case)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")


@functools.lru_cache(maxsize=64)
def _own_files(kernel: Kernel) -> frozenset[str]:
    return frozenset(str(path) for path in kernel.source_files())


def _blamed(session: Session, error: Exception) -> str:
    """Returns the direction whose kernel an exception comes from."""
    gradient = session.kernel.gradient
    if gradient is None or "forward" not in session.directions:
        return session.directions[-1]
    names = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    inner = {gradient.fn.__name__}
    subject = getattr(error, "subject", "")
    return "backward" if names & inner or subject in inner or subject == gradient.name else "forward"


# --- values


def parity(session: Session, case: Case, *, name: str = "parity", program: Program | None = None) -> Finding | None:
    """Outputs and gradients agree with the reference, computed with the chip's arithmetic."""
    try:
        program = program or session.programs[case.point]
        operands = program.plan.operands(case)
        results = program.run(operands)
        return judged(session, program.plan, case, operands, results, name, program)
    except Exception as error:
        return refused(session, case, name, error)


def confirmed(session: Session, found: Finding) -> bool:
    """Whether a wrong result stays wrong when XLA compiles as usual: compiling fast may have been what was wrong."""
    assert found.case is not None
    plan = programs.plan(session.kernel, found.case.point, gradient=session.gradient)
    program = Program(plan, CHIP, timeout=session.timeout, optimised=True)
    return parity(session, found.case, name=found.property, program=program) is not None


def judged(
    session: Session,
    plan: Plan,
    case: Case,
    operands: Sequence[np.ndarray],
    results: reference.Arrays,
    name: str,
    program: Program | None = None,
) -> Finding | None:
    """Returns the worst result that is beyond its bound, and notes the errors of all; nothing if there is no reference."""
    if session.kernel.reference is None:
        return None
    oracle, found = Oracle(plan, session.references.of(plan, operands), program), None
    for o in session.results_of(plan):
        if o.name not in results:
            continue
        bound, key = session.bounds.of(o), (o.name, case.point.dtype)
        before = session.worst.get(key)
        error = oracle.judge(o, results[o.name], bound, before.ulps if before else 0.0)
        if error is None:
            continue
        direction = session.direction_of(plan, o.name)
        if error.ulps > bound or np.isnan(error.ulps):
            what = f"{o.name} is off by {error}; the bound is {bound:g}"
            if found is None or error.ulps > (found.ulps or 0):
                found = Finding(
                    property=name, direction=direction, what=what, case=case, output=o.name, ulps=error.ulps, bound=bound,
                    got=error.got, want=error.want,
                )  # fmt: skip
        elif before is None or error.ulps > before.ulps:
            session.worst[key] = dataclasses.replace(
                before or Worst(output=o.name, direction=direction, dtype=case.point.dtype, ulps=0.0, bound=bound),
                ulps=error.ulps,
                case=case,
            )
    return found


def native(session: Session, case: Case) -> None:
    """Notes how far ATen is off, in the operands' own dtype, on a case of finite values."""
    program = session.programs[case.point]
    told = session.references.of(program.plan, program.plan.operands(case))
    oracle = Oracle(program.plan, told)
    if not told.finite:
        return
    for o in session.results_of(program.plan):
        key = (o.name, case.point.dtype)
        got, known = told.native.get(o.name), session.worst.get(key)
        if got is None or known is None or got.size == 0 or got.dtype.name != o.dtype:
            continue
        error = oracle.judge(o, got, session.bounds.of(o), known.native or 0.0)
        if error is not None and np.isfinite(error.ulps):
            session.worst[key] = dataclasses.replace(known, native=max(known.native or 0.0, error.ulps))


def configs_agree(session: Session, case: Case, *, count: int, seed: int) -> Iterator[Finding | None]:
    """Every config gives the reference's results. Yields one answer a config."""
    rng, tried = np.random.default_rng([seed, 7]), {case.point}
    for turn in range(4 * count):
        if len(tried) > count:
            return
        form = "largest" if turn == 0 else "drawn"
        try:
            point = strategies.with_configs(session.kernel, case.point, form, rng)
        except TpukernError:
            continue
        if point in tried:
            continue
        tried.add(point)
        other = dataclasses.replace(case, point=point)
        yield parity(session, other, name="configs_agree")


def finite_difference(session: Session, case: Case) -> Finding | None:
    """The reference's gradient, which the kernel's is compared with, is that of finite differences.

    Along one random direction, in float64. Where the differences of two step widths disagree the op is not smooth there, and
    nothing is said.
    """
    plan = programs.plan(session.kernel, case.point)
    told = session.references.of(plan, plan.operands(case))
    count, rng = len(plan.signature.inputs), np.random.default_rng([case.seed, 11])
    inputs = [a.astype(np.float64) if judging.floating(a) else a for a in told.operands[:count]]
    wanted = {o.name[1:] for o in plan.backward.outputs} if plan.backward else set()
    names = [o.name for o in plan.signature.inputs]
    along = [rng.standard_normal(a.shape) if n in wanted else None for n, a in zip(names, inputs, strict=True)]

    def loss(step: float) -> float:
        at = [a if v is None else a + step * v for a, v in zip(inputs, along, strict=True)]
        outputs = reference.outputs(session.kernel, plan.signature, at)
        pairs = zip(plan.cotangents, told.operands[count:], strict=True)
        return float(sum(np.sum(outputs[name] * dy.astype(np.float64)) for name, dy in pairs if name in outputs))

    parts = [np.sum(told.exact[f"d{n}"] * v) for n, v in zip(names, along, strict=True) if v is not None]
    sizes = [np.sum((told.exact[f"d{n}"] * v) ** 2) for n, v in zip(names, along, strict=True) if v is not None]
    slope, scale = float(sum(parts)), float(np.sqrt(sum(sizes))) + 1e-30
    wide, narrow = ((loss(h) - loss(-h)) / (2 * h) for h in _STEPS)
    if abs(wide - narrow) > 1e-3 * scale or abs(narrow - slope) <= 1e-2 * scale:
        return None
    what = f"along a random direction the reference's gradient is {slope:.6g} and the finite difference {narrow:.6g}"
    return Finding(property="finite_difference", direction="backward", what=what, case=case, got=slope, want=narrow)


def deterministic(session: Session, case: Case, *, again: bool = False) -> Finding | None:
    """The same call gives the same bits: run twice, and (`again`) traced and compiled anew."""
    try:
        program = session.programs[case.point]
        operands = program.plan.operands(case)
        first, second = program.run(operands), program.run(operands)
        how = "in two runs of one program"
        if again and not (difference := _differs(first, second)):
            how = "traced twice"
            second = Program(programs.plan(session.kernel, case.point, gradient=session.gradient), CHIP).run(operands)
        difference = _differs(first, second)
    except Exception as error:
        return refused(session, case, "deterministic", error)
    if difference is None:
        return None
    name, at = difference
    got, want = float(first[name][at]), float(second[name][at])
    what = f"not deterministic: {how} {name}{list(at)} is {got!r} and {want!r}"
    direction = session.direction_of(program.plan, name)
    return Finding(property="deterministic", direction=direction, what=what, case=case, output=name, got=got, want=want)


def _differs(first: reference.Arrays, second: reference.Arrays) -> tuple[str, tuple[int, ...]] | None:
    for name, a in first.items():
        same = (a == second[name]) | ((a != a) & (second[name] != second[name]))
        if not same.all():
            return name, tuple(int(i) for i in np.argwhere(~same)[0])
    return None


def batch_invariant(session: Session, case: Case) -> Iterator[Finding | None]:
    """An entry of a dim that nothing is summed over gives the same bits whatever the other entries hold.

    The declaration claims it of every grid dim that all outputs have. The other entries hold other numbers, then NaN.
    """
    try:
        program = session.programs[case.point]
        operands = program.plan.operands(case)
        base = program.run(operands)
    except Exception as error:
        yield refused(session, case, "batch_invariant", error)
        return
    plan = program.plan
    for name in strategies.batch_dims(session.kernel):
        if plan.signature.sizes[name] < 2:
            continue
        for filling in ("other", "nan"):
            changed, kept = _with_other_entries(plan, operands, name, filling, case.seed)
            results = program.run(changed)
            yield _same_entries(plan, case, base, results, name, kept, filling)


def _entries(plan: Plan, operand: Any, name: str, shape: tuple[int, ...], kept: np.ndarray) -> np.ndarray | None:
    """Returns which elements of an operand belong to the kept entries of a dim; None if it has no such dim."""
    if name not in operand.names:
        return None
    return judging.spread(operand, [name], plan.signature, kept, shape)


def _with_other_entries(
    plan: Plan, operands: Sequence[np.ndarray], name: str, filling: str, seed: int
) -> tuple[list[np.ndarray], np.ndarray]:
    k, rng = plan.kernel.declaration, np.random.default_rng([seed, 13])
    kept = np.arange(plan.signature.sizes[name]) % 2 == 0
    changed = []
    for o, array in zip(k.inputs, operands, strict=False):
        mine = _entries(plan, o, name, array.shape, kept)
        if mine is None or np.issubdtype(array.dtype, np.integer):
            changed.append(array)
            continue
        other = np.full(array.shape, np.nan) if filling == "nan" else rng.standard_normal(array.shape)
        changed.append(np.where(mine, array, other.astype(array.dtype)))
    return [*changed, *operands[len(changed) :]], kept


def _same_entries(
    plan: Plan, case: Case, base: reference.Arrays, results: reference.Arrays, name: str, kept: np.ndarray, filling: str
) -> Finding | None:
    for o in plan.kernel.declaration.outputs:
        mine = _entries(plan, o, name, base[o.name].shape, kept)
        if mine is None:
            continue
        a, b = base[o.name], results[o.name]
        wrong = mine & ~((a == b) | ((a != a) & (b != b)))
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            what = f"{o.name}{list(at)} is {float(a[at])!r}, and {float(b[at])!r} when other entries of {name} hold "
            what += "NaN" if filling == "nan" else "other numbers"
            return Finding(
                property="batch_invariant", direction="forward", what=what, case=case, output=o.name, got=float(b[at]),
                want=float(a[at]),
            )  # fmt: skip
    return None
