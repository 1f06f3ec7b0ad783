"""The one error metric.

An output element `got` of dtype t, whose exact value is `want` (float64), errs by

    |got - want| / max(m * (eps(t) + sqrt(n) * eps(float32)), a * tiny(t))      units in the last place

where `n` is the length of the longest reduction that leads to the element and `m` its magnitude:

    m = max(|want|, sensitivity)                        if a sensitivity is given,
    m = the largest finite |want| of the element's row  if none is (the last axis).

Why so. `eps(t)` is the rounding of the stored result. Accumulation is in float32 whatever t is; the error of a sum of n
products grows like sqrt(n) (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci.
Comput. 41(5), 2019), so for bfloat16 outputs n hardly matters and for float32 ones it does. Where terms cancel, |want|
says nothing of what was summed. The sensitivity does: it is how far the exact result moves, per eps, when every element of
every operand and of every intermediate result is rounded up or down at random (`reference.sensitivity`); of a dot product
it is sqrt(2 sum (x w)^2). The row's largest output is the stand-in when nobody computed it: right for a kernel whose row
shares one scale, too lenient for one with rows of mixed magnitude, too strict where a whole row cancels. `tiny(t)`, the
smallest normal number, is a floor: XLA on CPU and the TPU flush subnormals to zero. An intermediate result that is flushed
may still be multiplied by operands (sigmoid(-90) * -90 * 1000); `a`, the product of the operands' largest magnitudes
(`amplification`), allows for it. It is 1 unless given, and matters to results near `tiny` only.

NaN must meet NaN, and Inf must meet Inf of its sign, in the same places. A finite `want` that t cannot hold is compared
as the power of two just above t's largest number, and so is an Inf that should have been finite: overflow on either side
of the threshold is an error of a few units, far from it of many.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Error:
    """The worst element of an output.

    Attributes:
        ulps: Its error; `math.inf` where NaN or Inf disagree, or an integer differs.
        index: Where it is.
        got: What the kernel gave there.
        want: What the reference gave there.
        wrong_kind: How many elements disagree in kind (NaN, Inf) or, for integers, in value.
    """

    ulps: float
    index: tuple[int, ...] = ()
    got: float = 0.0
    want: float = 0.0
    wrong_kind: int = 0

    def __str__(self) -> str:
        where = "[" + ", ".join(map(str, self.index)) + "]"
        more = f" ({self.wrong_kind} elements disagree in NaN or Inf)" if self.wrong_kind else ""
        return f"{self.ulps:.3g} ulp at {where}: got {self.got:.9g}, want {self.want:.9g}{more}"


def worst(got: Any, want: Any, *, reduction: int = 1, sensitivity: Any = None, amplified: float = 1.0) -> Error:
    """Returns the worst error of one output.

    Args:
        got: The kernel's output; its dtype sets the unit.
        want: The exact output, float64 (or integers, compared exactly), of the same shape.
        reduction: Length of the longest reduction that leads to an element.
        sensitivity: The output's movement per unit of relative change of the operands, of the same shape.
        amplified: What a flushed intermediate may be multiplied by; see `amplification`.

    Raises:
        ValueError: The shapes differ.
    """
    result, exact = np.asarray(got), np.asarray(want)
    if result.shape != exact.shape:
        raise ValueError(f"got has shape {result.shape}, want {exact.shape}; expected one shape")
    if result.size == 0:
        return Error(ulps=0.0)
    errors, kind = per_element(result, exact, reduction=reduction, sensitivity=sensitivity, amplified=amplified)
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(errors)), errors.shape))
    return Error(
        ulps=float(errors[at]), index=at, got=float(result[at]), want=float(exact[at]), wrong_kind=int(np.count_nonzero(kind))
    )


def per_element(
    got: np.ndarray, want: np.ndarray, *, reduction: int = 1, sensitivity: Any = None, amplified: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the error of every element, and which of them disagree in kind."""
    if np.issubdtype(got.dtype, np.integer) or got.dtype == np.bool_:
        differ = np.asarray(got != want)
        return np.where(differ, math.inf, 0.0), differ
    info = ml_dtypes.finfo(got.dtype)
    above = math.ldexp(1.0, int(info.maxexp))
    with np.errstate(all="ignore"):
        result, exact = got.astype(np.float64), want.astype(np.float64)
        kind = (np.isnan(result) != np.isnan(exact)) | (np.isinf(exact) & (result != exact))
        off = np.abs(_held(result, above) - _held(exact, above))
        errors = off / unit(exact, info, reduction, sensitivity, amplified)
    errors = np.where(np.isnan(exact) | np.isinf(exact), 0.0, errors)
    return np.where(kind, math.inf, errors), kind


def unit(want: np.ndarray, info: Any, reduction: int = 1, sensitivity: Any = None, amplified: float = 1.0) -> np.ndarray:
    """Returns one unit in the last place for every element: the denominator above."""
    size = np.where(np.isfinite(want), np.abs(_held(want, math.ldexp(1.0, int(info.maxexp)))), 0.0)
    if sensitivity is not None:
        movement = np.abs(np.asarray(sensitivity, np.float64))
        magnitude = np.maximum(size, np.where(np.isnan(movement), 0.0, movement))
    else:
        magnitude = np.broadcast_to(np.max(size, axis=-1, keepdims=True), size.shape) if size.ndim else size
    grown = float(info.eps) + math.sqrt(max(1, reduction)) * float(np.finfo(np.float32).eps)
    return np.maximum(magnitude * grown, amplified * float(info.smallest_normal))


def amplification(operands: Iterable[Any]) -> float:
    """Returns the product of the operands' largest finite magnitudes, those below 1 left out."""
    product = 1.0
    for operand in operands:
        plain = np.asarray(operand)
        if plain.size and not np.issubdtype(plain.dtype, np.integer) and plain.dtype != np.bool_:
            size = np.abs(plain.astype(np.float64))
            product *= max(1.0, float(np.max(size, where=np.isfinite(size), initial=1.0)))
    return product


def _held(array: np.ndarray, above: float) -> np.ndarray:
    """Clips to the first power of two that the dtype cannot hold; NaN stays."""
    return np.clip(array, -above, above)
