"""Whether a result is right: the exact reference, what float32 may do to it, and what NaN and Inf may do to it.

Five rules beyond the error metric (`ulp`), so that only the kernel's faults count.

1. **Overflow.** A kernel computes in float32, the reference in float64. An element may be anything where the reference
   evaluated in float32 is no better than the bound; and it may be NaN or Inf where the product of the operands' largest
   magnitudes is beyond float32: some order of multiplying them overflows. It may also be anything where rounding moves the
   exact result beyond float32: exp(s - lse) of scores so large that their difference has no digits.
2. **NaN and Inf among the operands.** They are also replaced by several finite values. Output elements that do not move
   with these do not depend on the special operands and have to be right. Those that move are to be NaN where the reference
   is NaN, and Inf or NaN where it is Inf; where it is finite all the same (an Inf that is masked out, or divided by), NaN is
   allowed too: a product at HIGHEST turns Inf into NaN. NaN is also allowed in elements that do not move but belong to the
   same batch entry: 0 * NaN. Gradients that move, or belong to the same entry, may be
   anything: ATen itself is not consistent there.
3. **Other formulas.** The sensitivity is that of the reference's formula, and another one may round where that one happens
   not to: sum(o do) for sum(p dp). An element's magnitude counts as an eighth, at least, of the median in its matrix (the
   last two axes).
4. **Forward results** reach a gradient rounded to their dtype (a log-sum-exp of 1e5 has an eps of 0.008). What the kernel's
   gradient moves by when they move by one eps, up or down at random, counts as magnitude too; where that decides whether it
   is finite (exp(s - lse) of scores near 1e18), it may be anything.
5. **Subnormals** among the operands count as zero (`reference`), and results below the smallest normal number may be zero.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tpukern.dsl.signature import Operand
from tpukern.errors import ParityError
from tpukern.testing import reference, ulp
from tpukern.testing.programs import Plan, Program
from tpukern.testing.reference import Arrays
from tpukern.testing.strategies import axis_of, batch_dims

_QUICK, _THOROUGH, _NUDGES = 3, 24, 8  # trials
_NOTABLE: Final = 0.25  # ULPs
_SHARE: Final = 1 / 8
_STANDINS: Final = (0.75, -1.25, 1e4, -1e4)
_LARGEST: Final = float(np.finfo(np.float32).max)
_KEPT: Final = 64  # inputs, the last ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a kernel promises.

    Attributes:
        by: ULPs by the name of a result and its dtype (`"o float32"`), by name alone, or by dtype.
    """

    by: dict[str, float]

    def of(self, o: Operand) -> float:
        """Returns the bound of one result."""
        names = (f"{o.name} {o.dtype}", o.name, o.dtype)
        return next((self.by[name] for name in names if name in self.by), self.by["*"])


def bounds(kernel: Any) -> Bounds:
    """Returns the bounds of a kernel: its `tolerance`, a number, or numbers by dtype or result or both; 16 without one."""
    given = kernel.tolerance
    table = dict(given) if isinstance(given, dict) else {} if given is None else {"*": float(given)}
    return Bounds(by={"*": 16.0, **{str(name): float(value) for name, value in table.items()}})


def reduction(plan: Plan, o: Operand) -> int:
    """Returns the length of the longest sum that leads to a result, as far as the declaration tells."""
    k, sizes = plan.kernel.declaration, plan.signature.sizes
    declared = k.operand(o.name) or k.operand(o.name[1:])
    names = set(declared.names) if declared else set()
    summed = int(np.prod([max(1, sizes[n]) for n in k.grid if n not in names] or [1]))
    whole = [sizes[n] for n in sizes if n not in k.dims]
    return max([summed, *whole])


class Told:
    """What the reference says of one input; each part is computed when it is first asked for.

    Args:
        plan: What is computed.
        operands: Inputs, then cotangents.

    Raises:
        ParityError: The reference cannot tell.
    """

    def __init__(self, plan: Plan, operands: Sequence[np.ndarray]) -> None:
        self.plan, self.operands = plan, list(operands)
        self.finite = all(_finite(a) for a in self.operands)
        self._sensitivities: dict[int, Arrays] = {}

    def evaluate(self, operands: Sequence[Any], *, exact: bool = True) -> Arrays:
        """Evaluates the reference on operands in place of the program's own."""
        plan = self.plan
        count = len(plan.signature.inputs)
        inputs, given = list(operands[:count]), dict(zip(plan.cotangents, operands[count:], strict=False))
        if plan.backward is None:
            return reference.outputs(plan.kernel, plan.signature, inputs, exact=exact)
        found = reference.gradients(plan.kernel, plan.signature, inputs, given, exact=exact, with_outputs=True)
        return {name: found[name] for name in plan.names if name in found}

    @functools.cached_property
    def exact(self) -> Arrays:
        """The exact results."""
        return self.evaluate(self.operands)

    @functools.cached_property
    def single(self) -> Arrays:
        """The results of the reference in float32."""
        wide = [a.astype(np.float32) if floating(a) else a for a in self.operands]
        try:
            return self.evaluate(wide, exact=False)
        except ParityError:
            return {}

    @functools.cached_property
    def native(self) -> Arrays:
        """The results of the reference in the operands' own dtypes; none where ATen has no such op."""
        try:
            return self.evaluate(self.operands, exact=False)
        except ParityError:
            return {}

    @functools.cached_property
    def replaced(self) -> list[Arrays]:
        """The exact results for finite numbers in the place of NaN and Inf."""
        return [self.evaluate(self._standing_in(turn)) for turn in range(len(_STANDINS))]

    def _standing_in(self, turn: int) -> list[np.ndarray]:
        return [np.where(np.isfinite(a), a, np.asarray(_STANDINS[turn], a.dtype)) if floating(a) else a for a in self.operands]

    def sensitivity(self, name: str, trials: int) -> np.ndarray:
        """Returns how far a result moves when everything is rounded; finite numbers stand in for NaN and Inf."""
        if trials not in self._sensitivities:
            start = self.operands if self.finite else self._standing_in(0)
            seed = [trials, len(self.operands)]
            self._sensitivities[trials] = reference.sensitivity(self.evaluate, start, seed, trials=trials)
        return self._sensitivities[trials][name]


class References:
    """What a reference has said so far: it is asked once of an input, whatever the configs, and whatever of the kernel's
    mutants is judged by it.
    """

    def __init__(self) -> None:
        self._told: dict[Any, Told] = {}

    def of(self, plan: Plan, operands: Sequence[np.ndarray]) -> Told:
        """Returns what it says of an input: of these bytes, wherever they come from."""
        digest = hashlib.blake2b(digest_size=16)
        for array in operands:
            digest.update(np.ascontiguousarray(array).tobytes())
        key = (plan.signature, plan.names, digest.digest())
        if key not in self._told:
            if len(self._told) >= _KEPT:
                del self._told[next(iter(self._told))]
            self._told[key] = Told(plan, operands)
        return self._told[key]


class Oracle:
    """What one input of a program should give.

    Args:
        plan: What the program computes.
        told: What the reference says of the input.
        program: The kernel itself, to see how its gradient moves with the last bits of what its outputs hand on.
    """

    def __init__(self, plan: Plan, told: Told, program: Program | None = None) -> None:
        self.plan, self.told, self.program = plan, told, program
        self.operands, self.finite = told.operands, told.finite

    @functools.cached_property
    def amplification(self) -> float:
        """The product of the operands' largest magnitudes: those of forward results that the gradient takes among them.

        What the reference does not give of these (saved statistics) is taken from the kernel's own run.
        """
        names = [o.name for o in self.plan.handed_on]
        given: Arrays = self.told.exact
        if self.program is not None and not set(names) <= set(given):
            given = {**self.program.run(self.operands), **given}
        return ulp.amplification([*self.operands, *(given[name] for name in names if name in given)])

    # --- judging

    def judge(self, o: Operand, got: np.ndarray, bound: float, worst_yet: float = 0.0) -> ulp.Error | None:
        """Judges one result.

        Args:
            o: The result.
            got: What the kernel gave.
            bound: Its bound in ULPs.
            worst_yet: Errors beyond it are looked at more closely, as those beyond the bound are: the first look at the
                sensitivity is a coarse one.

        Returns:
            The worst element; None if the reference does not give this result.
        """
        if o.name not in self.told.exact:
            return None
        if got.size == 0:
            return ulp.Error(ulps=0.0)
        want = self.told.exact[o.name] if self.finite else self._where_right(o, got)
        errors = self._errors(o, got, want, _QUICK)
        if errors.max() > min(bound, max(worst_yet, _NOTABLE)):
            errors = self._errors(o, got, want, _THOROUGH)
        if errors.max() > bound and o.name in self.handed_on:
            errors = self._errors(o, got, want, _THOROUGH, self.handed_on[o.name])
        if errors.max() > bound:
            errors = np.where(self._excused(o, got, want, bound), 0.0, errors)
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(errors)), errors.shape))
        wrong = int(np.count_nonzero(np.isinf(errors)))
        return ulp.Error(ulps=float(errors[at]), index=at, got=float(got[at]), want=float(want[at]), wrong_kind=wrong)

    @functools.cached_property
    def handed_on(self) -> Arrays:
        """How far the kernel's gradients move when its outputs, as the gradient gets them, move by their last bit."""
        if self.program is None or not self.plan.handed_on:
            return {}
        still = {name: a.astype(np.float64) for name, a in self.program.run(self.operands).items()}
        total: dict[str, Any] = dict.fromkeys((o.name for o in self.plan.backward.outputs), 0.0) if self.plan.backward else {}
        coarsest = max((float(ulp.ml_dtypes.finfo(a.dtype).eps) for a in self.operands if floating(a)), default=1.0)
        with np.errstate(all="ignore"):
            for seed in range(_NUDGES):
                moved = self.program.run(self.operands, seed)
                for name in total:
                    now = moved[name].astype(np.float64)
                    change = (now - still[name]) / coarsest
                    change = np.where(np.isfinite(now) & np.isfinite(still[name]), change, 0.0)
                    change[np.isfinite(now) != np.isfinite(still[name])] = np.inf  # the last bit decides whether it overflows
                    total[name] = total[name] + change**2
        return {name: np.sqrt(t / _NUDGES) for name, t in total.items()}

    def _errors(self, o: Operand, got: np.ndarray, want: np.ndarray, trials: int, handed_on: Any = 0.0) -> np.ndarray:
        moved = np.maximum(self.told.sensitivity(o.name, _QUICK), handed_on)
        if trials != _QUICK:
            moved = np.maximum(moved, self.told.sensitivity(o.name, trials))
        moved = np.maximum(moved, _typical(np.maximum(moved, np.abs(want))) * _SHARE)
        errors, _ = ulp.per_element(
            got, want, reduction=reduction(self.plan, o), sensitivity=moved, amplified=self.amplification
        )
        return np.where(moved > _LARGEST, 0.0, errors)

    def _excused(self, o: Operand, got: np.ndarray, want: np.ndarray, bound: float) -> np.ndarray:
        """Returns which elements the rule of overflow lets pass."""
        excused = np.zeros(got.shape, bool)
        if self.amplification * reduction(self.plan, o) >= _LARGEST:
            excused |= ~np.isfinite(got.astype(np.float64))
        single = self.told.single.get(o.name)
        if single is not None and self.finite:
            errors, _ = ulp.per_element(
                single,
                want,
                reduction=reduction(self.plan, o),
                sensitivity=self.told.sensitivity(o.name, _THOROUGH),
                amplified=self.amplification,
            )
            scale = float(np.finfo(np.float32).eps) / float(ulp.ml_dtypes.finfo(got.dtype).eps)
            excused |= errors * scale > bound
        return excused

    def _where_right(self, o: Operand, got: np.ndarray) -> np.ndarray:
        """Returns what is wanted when operands are NaN or Inf: `got` itself wherever the rules allow it."""
        want, standins = self.told.exact[o.name], [r[o.name] for r in self.told.replaced]
        moves = np.zeros(want.shape, bool)
        with np.errstate(all="ignore"):
            for other in (*standins[1:], np.where(np.isnan(want), standins[0], want)):  # Inf moves what no finite number may
                moves |= np.abs(other - standins[0]) > 1e-12 * np.maximum(np.abs(standins[0]), np.abs(other))
        result = got.astype(np.float64)
        nan = np.isnan(result)
        if o.name not in {x.name for x in self.plan.signature.outputs}:
            allowed = moves | self._same_batch(o)
        else:
            allowed = moves & (nan | np.isfinite(want)) | (nan & self._same_batch(o))
        allowed |= (nan & np.isnan(want)) | (np.isinf(result) & (result == want))
        return np.where(allowed, result, np.where(moves, want, standins[0]))

    def _same_batch(self, o: Operand) -> np.ndarray:
        """Returns which elements share a batch entry with a NaN or Inf: 0 times that is NaN."""
        k, signature = self.plan.kernel.declaration, self.plan.signature
        declared = k.operand(o.name) or k.operand(o.name[1:])
        shared = np.zeros(o.shape, bool)
        names = [*(x.name for x in k.inputs), *self.plan.cotangents]
        for name, array in zip(names, self.operands, strict=False):
            source = k.operand(name)
            if not floating(array) or _finite(array) or source is None or declared is None:
                continue
            common = [n for n in batch_dims(self.plan.kernel) if n in source.names and n in declared.names]
            places = _mask_along(source, common, signature, ~np.isfinite(array.astype(np.float64)))
            shared |= spread(declared, common, signature, places, o.shape)
        return shared


def _typical(sizes: np.ndarray) -> np.ndarray:
    """Returns the median over the last two axes."""
    finite = np.where(np.isfinite(sizes), sizes, 0.0)
    return np.asarray(np.median(finite, axis=tuple(range(-min(2, sizes.ndim), 0)), keepdims=True))


def _mask_along(source: Any, common: list[str], signature: Any, mask: np.ndarray) -> np.ndarray:
    """Returns the mask over the common dims: whether any element there is set."""
    split, labels = _split(source, common, signature, mask.shape)
    wide = mask.reshape(split)
    keep = [labels.index(n) for n in common]
    out = wide.any(axis=tuple(i for i in range(wide.ndim) if i not in keep))
    ranks = [sorted(keep).index(i) for i in keep]
    return np.asarray(out).transpose(ranks) if keep else np.asarray(out)


def spread(declared: Any, common: list[str], signature: Any, places: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a mask over the common dims as one over an array of `shape`, declared as `declared`."""
    split, labels = _split(declared, common, signature, shape)
    at = [labels.index(n) for n in common]
    ordered = places.transpose([int(i) for i in np.argsort(at)]) if at else places
    wide = ordered.reshape([n if i in at else 1 for i, n in enumerate(split)])
    return np.broadcast_to(wide, split).reshape(shape)


def _split(o: Any, common: list[str], signature: Any, shape: tuple[int, ...]) -> tuple[list[int], list[str]]:
    """Returns a shape in which every common dim has one axis of its own, and the dims of its axes (empty for others)."""
    spans = []
    for name in common:
        found = axis_of(o, name, signature)
        assert found is not None
        spans.append((found[0].start, found[0].stop, found[1], name))
    split: list[int] = []
    labels: list[str] = []
    at = 0
    axes = sorted({(start, stop): None for start, stop, _, _ in spans})
    for start, stop in axes:
        split += shape[at:start]
        labels += [""] * (start - at)
        here = [s for s in spans if s[:2] == (start, stop)]
        parts = here[0][2]
        if parts:
            group = next(axis.names for axis in o.axes if getattr(axis, "names", None) and here[0][3] in axis.names)
            split += parts
            labels += [n if n in common else "" for n in group]
        else:
            split.append(int(np.prod(shape[start:stop])))
            labels.append(here[0][3])
        at = stop
    split += shape[at:]
    labels += [""] * (len(shape) - at)
    return split, labels


def floating(array: np.ndarray) -> bool:
    """Whether an array holds floats."""
    return not (np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_)


def _finite(array: np.ndarray) -> bool:
    return not floating(array) or bool(np.isfinite(array.astype(np.float64)).all())
