"""Inputs that kernels are tried on: one seeded array for each class of values.

Every class fills an array of any shape and dtype. Magnitudes are set relative to the dtype's exponent range, so that
`huge` and `tiny` stay representable through one product and a sum over some hundred of them, in float32 accumulation
(bfloat16 has float32's range).
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import ml_dtypes
import numpy as np

_Rule = Callable[[np.random.Generator, tuple[int, ...], Any], np.ndarray]  # (rng, shape, finfo or iinfo)


def values(kind: str, shape: Sequence[int], dtype: Any, seed: int | Sequence[int] = 0) -> np.ndarray:
    """Returns an array of one class of values.

    Args:
        kind: One of `KINDS`, applicable to the dtype.
        shape: Any shape, zero-size and zero-rank ones too.
        dtype: A NumPy dtype, or one of ml_dtypes (bfloat16, float8_*), or its name.
        seed: The same seed gives the same array.

    Raises:
        ValueError: There is no such class, or an integer dtype has no such values (NaN, Inf, tiny, subnormal).
    """
    wanted, sizes = dtype_named(dtype), tuple(int(n) for n in shape)
    if kind not in KINDS:
        raise ValueError(f"no value class {kind!r}; expected one of {list(KINDS)}")
    rng = np.random.default_rng(seed)
    if np.issubdtype(wanted, np.integer) or wanted == np.bool_:
        if kind not in _INTEGERS:
            raise ValueError(f"{wanted.name} has no {kind!r} values; expected one of {list(_INTEGERS)}")
        info = np.iinfo(np.int8 if wanted == np.bool_ else wanted)
        return _INTEGERS[kind](rng, sizes, info).astype(wanted)
    with np.errstate(all="ignore"):
        return _FLOATS[kind](rng, sizes, ml_dtypes.finfo(wanted)).astype(wanted)


def kinds(dtype: Any) -> tuple[str, ...]:
    """Returns the classes that a dtype has values of."""
    wanted = dtype_named(dtype)
    if np.issubdtype(wanted, np.integer) or wanted == np.bool_:
        return tuple(_INTEGERS)
    limited = () if np.isnan(np.array(np.nan).astype(wanted)) else ("nan",)
    without_inf = () if np.isinf(np.array(np.inf).astype(np.float64).astype(wanted).astype(np.float64)) else ("inf",)
    return tuple(kind for kind in KINDS if kind not in limited + without_inf)


def dtype_named(dtype: Any) -> np.dtype:
    """Returns the NumPy dtype of a name, scalar type or dtype; knows bfloat16 and the 8-bit floats."""
    if isinstance(dtype, str) and hasattr(ml_dtypes, dtype):
        return np.dtype(getattr(ml_dtypes, dtype))
    return np.dtype(dtype)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], info: Any) -> np.ndarray:
    return rng.standard_normal(shape)


def _powers(rng: np.random.Generator, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
    """Magnitudes spread evenly over the exponents from `low` to `high`, with random signs."""
    return _signs(rng, shape) * np.exp2(rng.uniform(low, high, shape))


def _signs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.where(rng.random(shape) < 0.5, -1.0, 1.0)


def _huge(rng: np.random.Generator, shape: tuple[int, ...], info: Any) -> np.ndarray:
    return _powers(rng, shape, info.maxexp / 3, info.maxexp * 0.46)


def _tiny(rng: np.random.Generator, shape: tuple[int, ...], info: Any) -> np.ndarray:
    return _powers(rng, shape, info.minexp * 0.46, info.minexp / 3)


def _subnormal(rng: np.random.Generator, shape: tuple[int, ...], info: Any) -> np.ndarray:
    steps = 2 ** int(info.nmant)
    return _signs(rng, shape) * rng.integers(1, steps, shape) * float(info.smallest_subnormal)


def _constant(rng: np.random.Generator, shape: tuple[int, ...], info: Any) -> np.ndarray:
    return np.full(shape, rng.choice((-1.0, 1.0)) * rng.uniform(0.5, 2.0))


def _with(special: Sequence[float]) -> _Rule:
    """Normal values, about one in sixteen of them (and at least one) special."""

    def rule(rng: np.random.Generator, shape: tuple[int, ...], info: Any) -> np.ndarray:
        array = rng.standard_normal(shape)
        if array.size:
            places = rng.choice(array.size, max(1, array.size // 16), replace=False)
            array.reshape(-1)[places] = rng.choice(np.asarray(special), len(places))
        return array

    return rule


def _mirrored(rows: np.ndarray) -> np.ndarray:
    """Makes the last axis sum to exactly zero: its second half is the negated first half, reversed; an odd middle is 0."""
    n = rows.shape[-1] if rows.ndim else 0
    half = n // 2
    if half:
        rows[..., n - half :] = -rows[..., :half][..., ::-1]
    if n % 2:
        rows[..., half] = 0
    return rows


def _cancellation(rng: np.random.Generator, shape: tuple[int, ...], info: Any) -> np.ndarray:
    span = min(8.0, info.maxexp / 3)
    return _mirrored(_powers(rng, shape, -span / 2, span))


def _sorted(rng: np.random.Generator, shape: tuple[int, ...], info: Any) -> np.ndarray:
    array = rng.standard_normal(shape)
    return np.sort(array, axis=-1) if shape else array


def _one_hot(rng: np.random.Generator, shape: tuple[int, ...], info: Any) -> np.ndarray:
    array = np.zeros(shape)
    if array.size:
        rows = array.reshape(-1, shape[-1] if shape else 1)
        rows[np.arange(len(rows)), rng.integers(0, rows.shape[1], len(rows))] = 1.0
    return array


def _integers(low: int, high: int) -> _Rule:
    def rule(rng: np.random.Generator, shape: tuple[int, ...], info: Any) -> np.ndarray:
        return rng.integers(max(low, int(info.min)), min(high, int(info.max)), shape, endpoint=True)

    return rule


def _huge_integers(rng: np.random.Generator, shape: tuple[int, ...], info: Any) -> np.ndarray:
    high = rng.integers(int(info.max) - 8, int(info.max), shape, endpoint=True)
    if info.min == 0:
        return high
    return np.where(rng.random(shape) < 0.5, high, rng.integers(int(info.min), int(info.min) + 8, shape, endpoint=True))


_FLOATS: Final[Mapping[str, _Rule]] = MappingProxyType(
    {
        "normal": _normal,
        "huge": _huge,
        "tiny": _tiny,
        "subnormal": _subnormal,
        "constant": _constant,
        "nan": _with([np.nan]),
        "inf": _with([np.inf, -np.inf]),
        "cancellation": _cancellation,
        "sorted": _sorted,
        "one_hot": _one_hot,
    }
)

_INTEGERS: Final[Mapping[str, _Rule]] = MappingProxyType(
    {
        "normal": _integers(-8, 8),
        "huge": _huge_integers,
        "constant": lambda rng, shape, info: np.full(shape, rng.integers(1, 8)),
        "cancellation": lambda rng, shape, info: _mirrored(_integers(-8, 8)(rng, shape, info)),
        "sorted": lambda rng, shape, info: np.sort(_integers(-8, 8)(rng, shape, info), axis=-1) if shape else np.ones(()),
        "one_hot": _one_hot,
    }
)

KINDS: Final[tuple[str, ...]] = tuple(_FLOATS)
