"""Backward passes, bound by name: kernels and JAX functions, through jax.grad and by themselves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from tpukern.dsl import F32, Acc, Block, Config, Dim, In, Kernel, Out, Ref, dot, kernel, using
from tpukern.errors import ConfigError, SignatureError

RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def assert_close(got: jax.Array, want: Any, ulps: float = 64) -> None:
    want = np.asarray(want, np.float64)
    assert got.shape == want.shape
    atol = ulps * float(jnp.finfo(got.dtype).eps) * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=atol)


@kernel(op="dsl_test::rms_norm")
def rms_norm(
    x: Ref = In("*r d"),
    w: Ref = In("_ d"),
    y: Ref = Out("*r d"),
    rstd: Ref = Out("*r _", "float32", saved=True),
    *,
    eps: float = 1e-6,
    r: Dim = Block(8, 16, default=8),
) -> None:
    v = x[...].astype(F32)
    rstd[...] = jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + eps)
    y[...] = (v * rstd[...] * w[...].astype(F32)).astype(y.dtype)


@rms_norm.backward
@kernel
def rms_norm_backward(
    x: Ref = In("*r d"),
    w: Ref = In("_ d"),
    rstd: Ref = In("*r _", "float32"),
    dy: Ref = In("*r d"),
    dx: Ref = Out("*r d"),
    dw: Ref = Out("_ d", "float32", init=0.0),
    *,
    r: Dim = Block(8, 16, default=8),
) -> None:
    n = x[...].astype(F32) * rstd[...]
    g = dy[...].astype(F32)
    gw = g * w[...].astype(F32)
    dx[...] = (rstd[...] * (gw - n * jnp.mean(gw * n, axis=-1, keepdims=True))).astype(dx.dtype)
    dw[...] += jnp.sum(g * n, axis=0, keepdims=True)


def plain_rms_norm(x: jax.Array, w: jax.Array) -> jax.Array:
    x = x.astype(F32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * w.astype(F32)


@pytest.mark.parametrize(("dtype", "leading"), [("float32", (37,)), ("bfloat16", (2, 3))], ids=str)
def test_kernel_as_backward(dtype: str, leading: tuple[int, ...]) -> None:
    x, w, g = normal(*leading, 128, dtype=dtype), normal(128, dtype=dtype), normal(*leading, 128)
    dx, dw = jax.grad(lambda x, w: jnp.sum(rms_norm(x, w)[0].astype(F32) * g), argnums=(0, 1))(x, w)
    want = jax.grad(lambda x, w: jnp.sum(plain_rms_norm(x, w) * g), argnums=(0, 1))(x.astype(F32), w.astype(F32))
    assert dx.dtype == dw.dtype == dtype
    ulps = 64 if dtype == "float32" else 2
    assert_close(dx, want[0], ulps)
    assert_close(dw, want[1], ulps)


def test_gradients_have_their_inputs_dtype_also_when_called_directly() -> None:
    x, w = normal(8, 128, dtype="bfloat16"), normal(128, dtype="bfloat16")
    _, rstd = rms_norm(x, w)
    dx, dw = rms_norm_backward(x, w, rstd, x)
    assert (dx.dtype, dw.dtype) == ("bfloat16", "bfloat16")


def test_cotangents_of_saved_outputs_are_dropped() -> None:
    x, w = normal(8, 128), normal(128)
    (dx,) = jax.grad(lambda x: jnp.sum(rms_norm(x, w)[1]), argnums=(0,))(x)
    assert (dx == 0).all()


def test_gradient_is_known_to_its_forward() -> None:
    assert rms_norm.gradient is rms_norm_backward
    assert rms_norm_backward.forward is rms_norm
    assert rms_norm.directions == {"forward": rms_norm, "backward": rms_norm_backward}
    signature = rms_norm.signature(normal(5, 128), normal(128), eps=1.0)
    assert str(rms_norm.gradient_signature(signature)) == (
        "rms_norm_backward(x: float32[5,128], w: float32[128], rstd: float32[5], dy: float32[5,128]) -> dx: float32[5,128], "
        "dw: float32[128]"
    )


def test_forward_config_reaches_the_forward_and_the_context_the_backward() -> None:
    x, w = normal(40, 128), normal(128)

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(rms_norm(x, w, block_r=16)[0])

    def grids(jaxpr: Any) -> list[tuple[str, tuple[int, ...]]]:
        found = []
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                found.append((equation.params["name"], equation.params["grid_mapping"].grid))
            for value in equation.params.values():
                if hasattr(value, "jaxpr"):
                    found += grids(value.jaxpr)
        return found

    with using(configs={"rms_norm_backward": {"block_r": 8}}):
        jaxpr = jax.make_jaxpr(jax.grad(loss))(x)
    assert grids(jaxpr.jaxpr) == [("rms_norm", (3,)), ("rms_norm_backward", (5,))]


# A JAX function as backward


@kernel
def multiply(
    x: Ref = In("m k"),
    w: Ref = In("k n"),
    y: Ref = Out("m n"),
    acc: Ref = Acc("m n"),
    *,
    m: Dim = Block(128, 256),
    n: Dim = Block(128),
    k: Dim = Block(128),
) -> None:
    acc[...] += dot(x[...], w[...])

    @pl.when(k.last)
    def _() -> None:
        y[...] = acc[...].astype(y.dtype)


@kernel(op="dsl_test::linear")
def linear(
    x: Ref = In("m k"),
    w: Ref = In("k n"),
    label: Ref = In("m _", "int32"),
    y: Ref = Out("m n"),
    acc: Ref = Acc("m n"),
    *,
    gain: float = 2.0,
    m: Dim = Block(128),
    n: Dim = Block(128),
    k: Dim = Block(128),
) -> None:
    acc[...] += dot(x[...], w[...])

    @pl.when(k.last)
    def _() -> None:
        y[...] = (gain * acc[...]).astype(y.dtype)


@linear.backward
def linear_backward(x: jax.Array, w: jax.Array, dy: jax.Array, gain: float) -> dict[str, jax.Array]:
    """Two kernel calls."""
    return {"dx": gain * multiply(dy, w.T, block_m=128), "dw": gain * multiply(x.T, dy, block_m=128)}


def test_function_as_backward() -> None:
    x, w, label, g = normal(30, 140), normal(140, 130), jnp.zeros(30, jnp.int32), normal(30, 130)
    dx, dw = jax.grad(lambda x, w: jnp.sum(linear(x, w, label, gain=3.0) * g), argnums=(0, 1))(x, w)
    assert_close(dx, 3 * np.asarray(g, np.float64) @ np.asarray(w, np.float64).T)
    assert_close(dw, 3 * np.asarray(x, np.float64).T @ np.asarray(g, np.float64))


def test_function_becomes_a_kernel_with_a_derived_declaration() -> None:
    assert isinstance(linear_backward, Kernel)
    assert (linear_backward.frontend, linear_backward.op, linear_backward.doc) == (
        "jax",
        "dsl_test::linear_backward",
        "Two kernel calls.",
    )
    assert [str(o) for o in linear_backward.declaration.inputs] == ['x "m k"', 'w "k n"', 'dy "m n"']
    assert [str(o) for o in linear_backward.declaration.outputs] == ['dx "m k"', 'dw "k n"']
    assert dict(linear_backward.declaration.static_types) == {"gain": float}


def test_configs_of_a_composite_are_those_of_the_kernels_it_calls() -> None:
    signature = linear_backward.signature(normal(300, 140), normal(140, 130), normal(300, 130))
    assert linear_backward.default_config(signature) == {
        "multiply.block_n": 128,
        "multiply.block_k": 128,
    }  # block_m is pinned by the calls, so it is no key


@kernel
def product(x: Ref = In("m k"), w: Ref = In("k n"), y: Ref = Out("m n")) -> None:
    y[...] = dot(x[...], w[...])


@product.backward
def both_free(x: jax.Array, w: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
    return {"dx": multiply(dy, w.T), "dw": multiply(x.T, dy)}


def test_configs_of_a_composite_can_be_chosen() -> None:
    arrays = normal(300, 140), normal(140, 130), normal(300, 130)
    signature = both_free.signature(*arrays)
    assert [str(config) for config in both_free.configs(signature)] == [
        "multiply.block_m=128,multiply.block_n=128,multiply.block_k=128",
        "multiply.block_m=256,multiply.block_n=128,multiply.block_k=128",
    ]
    bound = both_free.bind(*arrays, config=Config.parse("multiply.block_m=256"))
    assert [call.grid for call in bound.calls] == [(2, 2, 2), (1, 2, 3)]
    assert bound.config["multiply.block_m"] == 256
    with pytest.raises(ConfigError) as caught:
        both_free.bind(*arrays, config=Config.parse("multiply.block_mm=256"))
    assert str(caught.value) == (
        "both_free[config]: no keyword 'multiply.block_mm'; expected one of ['multiply.block_m', 'multiply.block_n', "
        "'multiply.block_k']. Did you mean 'multiply.block_m'."
    )
    with pytest.raises(ConfigError) as caught:
        both_free.bind(*arrays, config=Config.parse("multiply.block_m=12"))
    assert str(caught.value) == "multiply[config]: block_m = 12; expected a multiple of 8, or at least the size of the dim."


@kernel
def doubled(x: Ref = In("r d"), y: Ref = Out("r d"), *, r: Dim = Block(8)) -> None:
    y[...] = x[...] * 2


@jax.jit
def doubled_twice(x: jax.Array) -> jax.Array:
    return doubled(doubled(x))


@doubled.backward
def doubled_backward(dy: jax.Array) -> dict[str, jax.Array]:
    return {"dx": doubled_twice(dy) / 2}


def test_a_jit_inside_of_a_composite_does_not_keep_what_was_recorded() -> None:
    dy = normal(16, 128)
    assert doubled_backward.default_config(doubled_backward.signature(dy)) == {"doubled.block_r": 8}
    np.testing.assert_array_equal(doubled_backward(dy), dy * 2)
    np.testing.assert_array_equal(doubled_twice(dy), dy * 4)


@kernel
def scale_rows(x: Ref = In("r d"), table: Ref = In("_ d"), y: Ref = Out("r d"), *, r: Dim = Block(8)) -> None:
    y[...] = x[...] * table[...]


@scale_rows.backward(gives=("x",))
def scale_rows_backward(table: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
    return {"dx": dy * table}


def test_an_input_may_have_no_gradient() -> None:
    x, table = normal(8, 128), normal(128)
    dx, dtable = jax.grad(lambda x, t: jnp.sum(scale_rows(x, t)), argnums=(0, 1))(x, table)
    assert_close(dx, jnp.broadcast_to(table, x.shape))
    assert (dtable == 0).all()


# Errors


@kernel
def swiglu(gate: Ref = In("*r f"), up: Ref = In("*r f"), y: Ref = Out("*r f"), *, r: Dim = Block(8)) -> None:
    y[...] = gate[...] * up[...]


@kernel
def f(x: Ref = In("r d"), y: Ref = Out("r d"), s: Ref = Out("r _"), *, r: Dim = Block(8)) -> None:
    y[...] = x[...]


def test_backward_that_wants_an_unknown_name() -> None:
    @kernel
    def back(g: Ref = In("*r f"), dy: Ref = In("*r f"), dgate: Ref = Out("*r f"), *, r: Dim = Block(8)) -> None: ...

    with pytest.raises(SignatureError) as caught:
        swiglu.backward(back)
    assert str(caught.value) == "swiglu[signature]: backward back wants 'g'; expected one of ['gate', 'up', 'y', 'dy']."


def test_function_that_wants_an_unknown_name() -> None:
    with pytest.raises(SignatureError) as caught:
        swiglu.backward(lambda gate, upp, dy: {})
    assert str(caught.value) == (
        "swiglu[signature]: backward <lambda> wants 'upp'; expected one of ['gate', 'up', 'y', 'dy']. Did you mean 'up'."
    )


def test_backward_that_ignores_a_cotangent() -> None:
    @kernel
    def g(x: Ref = In("r d"), dy: Ref = In("r d"), dx: Ref = Out("r d"), *, r: Dim = Block(8)) -> None: ...

    with pytest.raises(SignatureError) as caught:
        f.backward(g)
    assert str(caught.value) == (
        "f[signature]: backward g ignores ds; expected a parameter ds. If s is only kept for the backward, say Out(..., "
        "saved=True)."
    )


def test_backward_that_gives_an_unknown_name() -> None:
    @kernel
    def g(dy: Ref = In("r d"), ds: Ref = In("r _"), dz: Ref = Out("r d"), *, r: Dim = Block(8)) -> None: ...

    with pytest.raises(SignatureError) as caught:
        f.backward(g)
    assert str(caught.value) == "f[signature]: backward g gives 'dz'; expected one of ['dx']."


def test_function_that_returns_the_wrong_gradients() -> None:
    @kernel
    def h(x: Ref = In("r d"), w: Ref = In("_ d"), y: Ref = Out("r d"), *, r: Dim = Block(8)) -> None: ...

    @h.backward
    def h_backward(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        return {"dx": dy}

    x, w = normal(8, 128), normal(128)
    with pytest.raises(SignatureError) as caught:
        h_backward(x, w, x)
    assert str(caught.value) == (
        "h_backward[signature]: the function returned a dict of ['dx']; expected a dict of ['dx', 'dw']. Inputs without a "
        "gradient are left out by @<kernel>.backward(gives=(...))."
    )

    @h.backward
    def h_shapes(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        return {"dx": dy, "dw": dy}

    with pytest.raises(SignatureError) as caught:
        h_shapes(x, w, x)
    assert str(caught.value) == "h_shapes[signature]: dw has shape (8, 128); expected (128,), the shape of w."


def test_no_backward() -> None:
    with pytest.raises(SignatureError) as caught:
        swiglu.gradient_signature(swiglu.signature(normal(8, 128), normal(8, 128)))
    assert str(caught.value) == "swiglu[signature]: it has no backward; expected one, declared with @swiglu.backward."
