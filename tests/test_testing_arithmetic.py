"""The chip's rounding, on a CPU."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpukern.errors import ConfigError, LowerError
from tpukern.testing.arithmetic import tpu_arithmetic
from tpukern.testing.ulp import worst

P = lax.Precision
K = 512


def matmul(precision, interpret=True, out=jnp.float32):
    """x (16, K) @ w (K, 128), K in two steps, with an accumulator."""

    def body(x, w, y, acc):
        @pl.when(pl.program_id(0) == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)

        acc[...] += lax.dot_general(
            x[...], w[...], (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=acc.dtype
        )
        y[...] = acc[...].astype(y.dtype)

    return pl.pallas_call(
        body,
        grid=(2,),
        in_specs=[pl.BlockSpec((16, K // 2), lambda k: (0, k)), pl.BlockSpec((K // 2, 128), lambda k: (k, 0))],
        out_specs=pl.BlockSpec((16, 128), lambda k: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((16, 128), out),
        scratch_shapes=[pltpu.VMEM((16, 128), jnp.int32 if out == jnp.int32 else jnp.float32)],
        interpret=interpret,
        name="matmul",
    )


def map_kernel(function):
    def body(x, y):
        y[...] = function(x[...])

    def run(x):
        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    return run


@pytest.fixture(scope="module")
def operands():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((16, K)).astype(np.float32), rng.standard_normal((K, 128)).astype(np.float32)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    return x, w, exact, np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64)


def ulps(got, operands):
    return worst(np.asarray(got), operands[2], reduction=K, sensitivity=operands[3]).ulps


def test_float32_at_default_precision_visibly_errs_and_at_highest_does_not(operands):
    x, w, *_ = operands
    assert ulps(matmul(P.DEFAULT)(x, w), operands) < 1  # what the CPU says
    assert ulps(tpu_arithmetic(matmul(P.DEFAULT))(x, w), operands) > 100
    assert ulps(tpu_arithmetic(matmul(None))(x, w), operands) > 100
    assert ulps(tpu_arithmetic(matmul(P.HIGHEST))(x, w), operands) < 1


def test_default_precision_is_rounding_of_the_operands_and_nothing_else(operands):
    x, w, *_ = operands
    rounded = [a.astype(ml_dtypes.bfloat16).astype(np.float64) for a in (x, w)]
    got = tpu_arithmetic(matmul(P.DEFAULT))(x, w)
    assert worst(np.asarray(got), rounded[0] @ rounded[1], reduction=K, sensitivity=operands[3]).ulps < 1
    same = tpu_arithmetic(matmul(P.DEFAULT))(*(a.astype(ml_dtypes.bfloat16) for a in (x, w)))
    assert np.array_equal(np.asarray(got), np.asarray(same))


def test_six_passes_drop_the_three_smallest_products():
    one = np.float32(1 + 2**-8 + 2**-23)  # parts 1, 2^-8, 2^-23: the dropped ones come to 2^-30 and less
    x = np.full((16, K), one)
    w = np.zeros((K, 128), np.float32)
    w[0] = one
    got = np.asarray(tpu_arithmetic(matmul(P.HIGHEST))(x, w), np.float64)
    kept = 1 + 2 * 2.0**-8 + 2.0**-16 + 2 * 2.0**-23
    assert np.all(got == np.float64(np.float32(kept)))
    assert kept != float(one) ** 2


def test_it_can_be_jitted_and_takes_kernels_in_target_form(operands):
    x, w, *_ = operands
    plain = np.asarray(tpu_arithmetic(matmul(P.HIGHEST))(x, w))
    assert np.array_equal(plain, np.asarray(jax.jit(tpu_arithmetic(matmul(P.HIGHEST)))(x, w)))
    assert np.array_equal(plain, np.asarray(tpu_arithmetic(matmul(P.HIGHEST, interpret=False))(x, w)))
    program = jax.make_jaxpr(matmul(P.HIGHEST))(x, w)
    (result,) = tpu_arithmetic(program)(x, w)
    assert np.array_equal(plain, np.asarray(result))


def test_shapes_and_grids_stay(operands):
    x, w, *_ = operands

    def calls(f):
        return [e.params["grid_mapping"].grid for e in jax.make_jaxpr(f)(x, w).jaxpr.eqns if e.primitive.name == "pallas_call"]

    assert calls(matmul(P.DEFAULT)) == calls(tpu_arithmetic(matmul(P.DEFAULT))) == [(2,)]
    assert jax.eval_shape(tpu_arithmetic(matmul(P.DEFAULT)), x, w).shape == (16, 128)


def test_what_mosaic_refuses(operands):
    x, w, *_ = operands
    with pytest.raises(LowerError) as high:
        tpu_arithmetic(matmul(P.HIGH))(x, w)
    assert str(high.value) == (
        "matmul[lower]: a dot of float32[16,256] and float32[256,128] states HIGH; expected lax.Precision.DEFAULT or HIGHEST "
        "in a kernel. Use HIGHEST for float32 operands, DEFAULT for bfloat16."
    )
    with pytest.raises(LowerError) as highest:
        tpu_arithmetic(matmul(P.HIGHEST))(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16))
    assert str(highest.value) == (
        "matmul[lower]: a dot of bfloat16[16,256] and bfloat16[256,128] states HIGHEST; expected HIGHEST for two float32 "
        "operands only. State DEFAULT: products of bfloat16, 8-bit floats and integers are exact."
    )
    with pytest.raises(LowerError) as mixed:
        tpu_arithmetic(matmul((P.DEFAULT, P.HIGHEST)))(x, w)
    assert str(mixed.value) == (
        "matmul[lower]: a dot of float32[16,256] and float32[256,128] states DEFAULT and HIGHEST; expected one precision for "
        "both operands."
    )
    with pytest.raises(LowerError) as preset:
        tpu_arithmetic(matmul(lax.DotAlgorithmPreset.F32_F32_F32))(x, w)
    assert str(preset.value) == (
        "matmul[lower]: a dot of float32[16,256] and float32[256,128] states F32_F32_F32; expected lax.Precision.DEFAULT "
        "or HIGHEST."
    )


def test_high_outside_a_kernel_is_three_passes(operands):
    x, w, *_ = operands

    def error(precision):
        return ulps(tpu_arithmetic(lambda a, b: jnp.dot(a, b, precision=precision))(x, w), operands)

    assert error(P.HIGHEST) < 0.1 < 1 < error(P.HIGH) < error(P.DEFAULT) / 50


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bfloat16"])
def test_narrow_operands_are_exact(dtype):
    rng = np.random.default_rng(1)
    kind = getattr(ml_dtypes, dtype, np.int8)
    x, w = (rng.integers(-8, 8, s).astype(kind) for s in ((16, K), (K, 128)))
    out = jnp.int32 if dtype == "int8" else jnp.float32
    got = tpu_arithmetic(matmul(P.DEFAULT, out=out))(x, w)
    assert np.array_equal(np.asarray(got, np.float64), x.astype(np.float64) @ w.astype(np.float64))


def test_infinity_in_the_six_passes_is_not_a_number(operands):
    x, w = operands[0].copy(), operands[1]
    x[0, 0] = np.inf
    assert np.isinf(np.asarray(tpu_arithmetic(matmul(P.DEFAULT))(x, w))[0]).all()
    got = np.asarray(tpu_arithmetic(matmul(P.HIGHEST))(x, w))
    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1:]).all()


def test_dots_in_nested_programs_are_found():
    rng = np.random.default_rng(2)
    a = rng.standard_normal((8, 8)).astype(np.float32)

    def dot(x):
        return jnp.dot(x, x.T, precision=P.DEFAULT)

    @jax.custom_vjp
    def custom(x):
        return dot(x)

    custom.defvjp(lambda x: (dot(x), x), lambda x, g: (g,))

    @jax.custom_jvp
    def custom_forward(x):
        return dot(x)

    custom_forward.defjvp(lambda x, t: (dot(x[0]), dot(t[0])))

    rounded = tpu_arithmetic(dot)(a)
    forms = {
        "jit": jax.jit(dot),
        "cond": lambda x: lax.cond(x[0, 0] > -100, dot, lambda x: x, x),
        "while": lambda x: lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, dot(c[1])), (0, x))[1],
        "scan": lambda x: lax.scan(lambda c, _: (dot(c), None), x, None, length=1)[0],
        "custom_vjp": custom,
        "custom_jvp": custom_forward,
        "remat": jax.checkpoint(dot),
        "vmap": lambda x: jax.vmap(dot)(x[None])[0],
    }
    assert not np.array_equal(np.asarray(dot(a)), np.asarray(rounded))
    for name, form in forms.items():
        for run in (form, map_kernel(form)):
            assert np.array_equal(np.asarray(tpu_arithmetic(run)(a)), np.asarray(rounded)), name
            assert not np.array_equal(np.asarray(run(a)), np.asarray(rounded)), name


def test_gradients_are_taken_inside():
    a = np.random.default_rng(3).standard_normal((8, 8)).astype(np.float32)

    def loss(x):
        return jnp.sum(jnp.dot(x, a, precision=P.DEFAULT) ** 2)

    got, plain = tpu_arithmetic(jax.grad(loss))(a), jax.grad(loss)(a)
    relative = np.abs(np.asarray(got) - np.asarray(plain)).max() / np.abs(np.asarray(plain)).max()
    assert 1e-4 < relative < 1e-1


@pytest.mark.parametrize(
    ("function", "exact", "low", "high", "relative"),
    [
        # the errors that were measured, and no more than a third below them
        (jnp.exp, np.exp, 3.0e-6, 6.0e-6, True),
        (jnp.exp2, np.exp2, 2.7e-6, 4.2e-6, True),
        (jnp.tanh, np.tanh, 1.0e-5, 2.0**-16, True),
        (jnp.log, np.log, 5.0e-6, 2.0**-16, False),
        (jax.nn.sigmoid, lambda x: 1 / (1 + np.exp(-x)), 2.0e-6, 8.0e-6, True),
    ],
)
def test_elementary_functions_err_as_documented(function, exact, low, high, relative):
    x = np.linspace(0.01, 4, 4096).astype(np.float32).reshape(32, 128)
    x = x if function is jnp.log else np.concatenate([x, -x])
    want = exact(x.astype(np.float64))
    for run in (function, map_kernel(function)):
        got = np.asarray(tpu_arithmetic(run)(x), np.float64)
        off = np.abs(got - want) / (np.abs(want) if relative else 1)
        assert low < off.max() < high
        off = np.abs(np.asarray(tpu_arithmetic(run, approximations=False)(x), np.float64) - want)
        assert (off / (np.abs(want) if relative else 1)).max() < 4e-7


def test_a_v4_is_less_exact():
    x = np.linspace(1.0004, 2, 4096).astype(np.float32)

    def error(function, exact, chip):
        return np.abs(np.asarray(tpu_arithmetic(function, chip)(x), np.float64) - exact(x.astype(np.float64))).max()

    assert 4e-5 < error(jnp.log2, np.log2, "v4") < 1.4e-4
    assert error(jnp.log, np.log, "v6e") < 2**-16 < 4 * 2**-16 < error(jnp.log, np.log, "v4")
    assert 2**-17 > error(jnp.tanh, np.tanh, "v5p") / 2 > error(jnp.tanh, np.tanh, "v4") / 10


@pytest.mark.parametrize(("chip", "low", "high"), [("v4", 1e-5, 2.0**-16), ("v5e", 1e-5, 2.0**-16), ("v6e", 0, 2.0**-23)])
def test_approximate_reciprocal(chip, low, high):
    x = np.linspace(1, 2, 1024).astype(np.float32).reshape(8, 128)
    got = np.asarray(tpu_arithmetic(map_kernel(lambda v: pl.reciprocal(v, approx=True)), chip)(x), np.float64)
    assert low <= np.abs(got * x - 1).max() <= high
    full = np.asarray(tpu_arithmetic(map_kernel(lambda v: pl.reciprocal(v, approx=False)), chip)(x), np.float64)
    assert np.abs(full * x - 1).max() <= 2.0**-23


def test_special_values_survive():
    x = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1, 200, -200])
    with np.errstate(all="ignore"):
        for function, exact in ((jnp.exp, np.exp), (jnp.exp2, np.exp2), (jnp.tanh, np.tanh), (jnp.log, np.log)):
            got, want = np.asarray(tpu_arithmetic(function)(x)), exact(x)
            assert np.array_equal(np.isnan(got), np.isnan(want)), function
            assert np.array_equal(np.isinf(got), np.isinf(want)), function
            assert np.allclose(got, want, rtol=1e-4, atol=1e-30, equal_nan=True), function
    bf16 = x.astype(ml_dtypes.bfloat16)
    assert np.array_equal(np.asarray(tpu_arithmetic(jnp.exp)(bf16)), np.asarray(jnp.exp(bf16)), equal_nan=True)


def test_a_target_that_does_not_exist():
    with pytest.raises(ConfigError, match=r"^target\[config\]: no target 'v3'"):
        tpu_arithmetic(jnp.exp, "v3")
