"""What the TPU's units compute, on a CPU.

XLA on CPU multiplies float32 matrices in float32 whatever precision they ask for, and its elementary functions are good
to an ulp or two; so a test on CPU flatters a kernel. `tpu_arithmetic` rewrites a program, kernel bodies included, into one
that rounds where the chip rounds. Shapes, grids, memory and order stay; the kernels run in plain interpret form.

**Matrix products**, by the precision that the equation states:

| operands | precision | computed as |
|---|---|---|
| float32 | DEFAULT | operands rounded to bfloat16, products exact, sum in float32 |
| float32 | HIGHEST | each operand cut into three bfloat16 parts, the six largest of nine products, sums in float32 |
| float32 | HIGH | in a kernel refused, as Mosaic refuses it; outside, three products of two parts |
| bfloat16, 8-bit floats | DEFAULT | exact products, sum in float32 |
| integers | DEFAULT | as they are |
| any but two float32 | HIGHEST | in a kernel refused, as Mosaic refuses it |

Sources. `jax.lax.Precision`: on TPU DEFAULT computes in bfloat16, HIGH in 3 and HIGHEST in 6 bfloat16 passes. Machine code
of libtpu 0.0.51 for v5e, v6e and v7x: HIGHEST issues six times the `vmatmul` of DEFAULT, and cuts operands with
`vand 0xffff0000` and `vsub`, by truncation, with no special case for Inf; so an Inf there gives NaN (Inf - Inf), here as
on the chip. On v7x DEFAULT packs operands by the instruction of a cast (`vpack.c.f32.bf16`); that cast rounds to nearest
even and flushes float32 subnormals, as measured on a v4 by the Pallas TPU tutorial (github.com/ayaka14732/
pallas-tpu-tutorial, commit 2887b75, chapter 1, "special values"). The order of summation inside the unit is not documented
and is left to XLA on CPU.

**Elementary functions** on float32, in kernels and outside (XLA and Mosaic issue the same instructions):

| function | the chip issues | modelled as |
|---|---|---|
| exp2 | one `vexp2` | rounded to 18 significant bits |
| exp | the product with log2(e) in float32, one `vexp2` | that product rounded, then as exp2; results below 2^-126 are 0 |
| logistic | the above, then 1 / (1 + e) | 1 / (1 + exp(-x)) |
| log | one `vlog2`, times ln(2) | log2 to 2^-16 absolute (v4: 2^-13), or 12 significant bits where that is finer |
| tanh | one `vtanh` | rounded to 16 significant bits (v4: 14) |
| pl.reciprocal(approx=True) | one `vrcp` | 16 significant bits on v4, v5e, v5p; exact on v6e, v7x |
| division, sqrt, rsqrt | `vrcp`, `vrsqrt`, corrected on v4 to v5p | left exact |

Sources. Instructions: machine code of libtpu 0.0.51 for v5e, v6e and v7x. On the last two the exact and the approximate
reciprocal are one and the same instruction, whose accuracy nobody documents. Errors on v4: the tutorial above, commit
ef9de25, chapter 1, "elementwise", raw instructions against float64: relative 4.1e-6 for exp2, 1.6e-5 for 1/x, 6.4e-5 for
tanh, 2.6e-4 (absolute 1.4e-4) for log2; corrected division, sqrt and rsqrt 2 ulp. From v5 on: JAX's
tests/unary_ops_accuracy_test.py says that tanh and log meet an absolute tolerance of 2^-16 with the fast implementation,
and that exp and exp2 do not meet 2^-18 with theirs, up to v6; v7x is taken to be like v6e. Everything else is left exact.
Mosaic has no fused multiply-add on these chips; whether XLA on CPU fuses one cannot be said in a jaxpr.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from tpukern.errors import LowerError
from tpukern.targets import Target
from tpukern.targets import target as target_named
from tpukern.testing import jaxprs

_F32: Final = jnp.float32
_LOG2_E: Final = 1.4426950216293335  # the float32 nearest to log2(e)
_LN_2: Final = 0.6931471805599453
_TINY: Final = float(jnp.finfo(jnp.float32).tiny)

_EXP2_BITS: Final = 18
_LOG2_BITS: Final = 12
_LOG2_STEPS: Final = {"v4": 2.0**12}  # steps per unit; half a step is the error
_TANH_BITS: Final = {"v4": 14}
_RECIPROCAL_BITS: Final = {"v4": 16, "v5e": 16, "v5p": 16}


def tpu_arithmetic(
    function: Callable[..., Any] | core.ClosedJaxpr, target: Target | str = "v5e", *, approximations: bool = True
) -> Callable[..., Any]:
    """Returns a function that computes what `function` computes on a TPU, on the CPU.

    Args:
        function: A JAX callable, or a traced program. Its `pallas_call`s may be in any form; they run in plain interpret
            form. Gradients are to be taken inside it: custom derivative rules do not survive.
        target: The chip. Matrix products are the same on all.
        approximations: False leaves elementary functions exact, so that matrix products are the only change.

    Returns:
        A function of the same arguments (for a program, of its operands, giving a tuple). It can be jitted.

    Raises:
        LowerError: When called: a kernel asks for a precision that Mosaic refuses.
    """
    chip = target if isinstance(target, Target) else target_named(target)

    def computed(*args: Any) -> Any:
        closed, tree = jaxprs.traced(function, args)
        return jaxprs.evaluate(rounded(closed, chip, approximations=approximations), tree, args)

    return functools.wraps(function)(computed) if callable(function) else computed


def rounded(closed: core.ClosedJaxpr, target: Target, *, approximations: bool = True) -> core.ClosedJaxpr:
    """Returns a traced program with the chip's rounding written out, its kernels in plain interpret form."""

    def rule(eqn: jaxprs.Eqn, place: jaxprs.Place) -> jaxprs.Eqn | None:
        name = eqn.primitive.name
        if name == "pallas_call":
            return eqn.replace(params={**eqn.params, "interpret": True})
        if name == "dot_general":
            product = _product(eqn, place)
            return jaxprs.calling(product, eqn) if product else None
        if name == "reciprocal":
            bits = _RECIPROCAL_BITS.get(target.name) if eqn.params["approx"] and approximations else None
            return jaxprs.calling(lambda x: _bits(1.0 / x, bits), eqn)
        substitute = _ELEMENTARY.get(name) if approximations else None
        if substitute and eqn.invars[0].aval.dtype == _F32:
            return jaxprs.calling(functools.partial(substitute, target.name), eqn)
        return None

    return jaxprs.rewrite(closed, rule)


# --- the matrix unit -------------------------------------------------------------------------------------------------


def _product(eqn: jaxprs.Eqn, place: jaxprs.Place) -> Callable[[Any, Any], Any] | None:
    """Returns what the matrix unit computes for a `dot_general`; None if that is what the CPU computes."""
    dtypes = [v.aval.dtype for v in eqn.invars]
    precision = _precision(eqn, place, dtypes)
    if not all(jnp.issubdtype(d, jnp.floating) and d.itemsize <= 4 and d != jnp.float16 for d in dtypes):
        return None
    full = _F32 in dtypes
    passes = {lax.Precision.HIGHEST: 3, lax.Precision.HIGH: 2}.get(precision, 1) if full else 1
    contract = functools.partial(
        lax.dot_general,
        dimension_numbers=eqn.params["dimension_numbers"],
        precision=lax.Precision.HIGHEST,
        preferred_element_type=_F32,
    )
    out = eqn.outvars[0].aval.dtype

    def product(a: Any, b: Any) -> Any:
        left, right = _parts(a, passes), _parts(b, passes)
        total: Any = None
        for order in reversed(range(passes)):  # the small products first
            for i in range(order + 1):
                if i < len(left) and order - i < len(right):
                    term = contract(left[i], right[order - i])
                    total = term if total is None else total + term
        return total.astype(out)

    return product


def _precision(eqn: jaxprs.Eqn, place: jaxprs.Place, dtypes: list[Any]) -> lax.Precision:
    """Returns the precision that a `dot_general` states.

    Raises:
        LowerError: Mosaic refuses it.
    """
    stated = eqn.params["precision"]
    both = stated if isinstance(stated, tuple) else (stated, stated)
    both = tuple(lax.Precision.DEFAULT if p is None else p for p in both)
    shapes = " and ".join(v.aval.str_short() for v in eqn.invars)
    subject = place.kernel or "program"
    if not all(isinstance(p, lax.Precision) for p in both):
        raise LowerError(subject, f"a dot of {shapes} states {both[0]}", "lax.Precision.DEFAULT or HIGHEST")
    if both[0] != both[1]:
        raise LowerError(
            subject, f"a dot of {shapes} states {both[0].name} and {both[1].name}", "one precision for both operands"
        )
    if place.kernel is None or _on_the_vector_unit(eqn):
        return both[0]
    if both[0] is lax.Precision.HIGH:
        do = "Use HIGHEST for float32 operands, DEFAULT for bfloat16."
        raise LowerError(subject, f"a dot of {shapes} states HIGH", "lax.Precision.DEFAULT or HIGHEST in a kernel", do)
    if both[0] is lax.Precision.HIGHEST and any(d != _F32 for d in dtypes):
        do = "State DEFAULT: products of bfloat16, 8-bit floats and integers are exact."
        raise LowerError(subject, f"a dot of {shapes} states HIGHEST", "HIGHEST for two float32 operands only", do)
    return both[0]


def _on_the_vector_unit(eqn: jaxprs.Eqn) -> bool:
    """Whether Mosaic computes it by multiplying and summing: a row against a matrix, not in float32 (jax 0.10.2)."""
    left, right = (v.aval for v in eqn.invars)
    (a, b), _ = eqn.params["dimension_numbers"]
    narrow = not (left.dtype == right.dtype == _F32)
    return narrow and (tuple(a), tuple(b)) == ((1,), (1,)) and left.ndim == right.ndim == 2 and right.shape[0] == 1


def _parts(x: Any, passes: int) -> list[Any]:
    """Returns the bfloat16 parts that an operand enters the unit as, held in float32."""
    if x.dtype != _F32:
        return [x.astype(_F32)]
    if passes == 1:
        return [_flushed(x).astype(jnp.bfloat16).astype(_F32)]
    parts = []
    for _ in range(passes):
        part = _flushed(lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000), _F32))
        parts.append(part)
        x = x - part
    return parts


def _flushed(x: Any) -> Any:
    return jnp.where(jnp.abs(x) < _TINY, jnp.zeros_like(x), x)


# --- elementary functions --------------------------------------------------------------------------------------------


def _bits(x: Any, bits: int | None) -> Any:
    """Rounds float32 to so many significant bits: a relative error of at most 2^-bits."""
    return x if bits is None else lax.reduce_precision(x, exponent_bits=8, mantissa_bits=bits - 1)


def _exp2(chip: str, t: Any) -> Any:
    whole = jnp.floor(t)
    power = lax.bitcast_convert_type((jnp.clip(whole, -126, 127).astype(jnp.int32) + 127) << 23, _F32)
    result = _bits(jnp.exp((t - whole) * _LN_2), _EXP2_BITS) * power
    result = jnp.where(t >= 128, jnp.inf, jnp.where(t < -126, 0.0, result))
    return jnp.where(jnp.isnan(t), t, result).astype(_F32)


def _exp(chip: str, x: Any) -> Any:
    return _exp2(chip, x * _F32(_LOG2_E))


def _logistic(chip: str, x: Any) -> Any:
    return 1.0 / (1.0 + _exp(chip, -x))


def _log(chip: str, x: Any) -> Any:
    exact = jnp.log2(x)
    steps = _LOG2_STEPS.get(chip, 2.0**15)
    even, fine = jnp.round(exact * steps) / steps, _bits(exact, _LOG2_BITS)
    even = jnp.where(jnp.isfinite(exact), even, exact)
    return jnp.where(jnp.abs(even - exact) < jnp.abs(fine - exact), even, fine) * _F32(_LN_2)


def _tanh(chip: str, x: Any) -> Any:
    return _bits(jnp.tanh(x), _TANH_BITS.get(chip, 16))


_ELEMENTARY: Final = {"exp": _exp, "exp2": _exp2, "log": _log, "logistic": _logistic, "tanh": _tanh}
