"""The tile form computes what it says: every role, axis and edge, in plain interpret form."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from tpukern.dsl import F32, NEG, Acc, Block, Choice, Dim, Each, In, Out, Ref, Scalar, Scratch, dot, kernel

RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def assert_ulps(got: jax.Array, want: jax.Array, ulps: float) -> None:
    """Compares to within `ulps` of the output's dtype, measured at the largest output."""
    assert got.shape == want.shape
    got64, want64 = np.asarray(got, np.float64), np.asarray(want, np.float64)
    limit = ulps * float(jnp.finfo(got.dtype).eps) * max(np.abs(want64).max(initial=0), 1e-30)
    np.testing.assert_allclose(got64, want64, rtol=0, atol=limit)


@kernel
def rms(
    x: Ref = In("*r d"),
    w: Ref = In("_ d"),
    y: Ref = Out("*r d"),
    rstd: Ref = Out("*r _", "float32", saved=True),
    *,
    eps: float = 1e-6,
    r: Dim = Block(8, 32, 128, default=32),
) -> None:
    v = x[...].astype(F32)
    rstd[...] = jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + eps)
    y[...] = (v * rstd[...] * w[...].astype(F32)).astype(y.dtype)


def rms_reference(x: jax.Array, w: jax.Array, eps: float = 1e-6) -> tuple[np.ndarray, np.ndarray]:
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    rstd = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * rstd * w, rstd[..., 0]


@pytest.mark.parametrize(
    ("leading", "d", "dtype"),
    [
        ((64,), 256, "bfloat16"),
        ((37,), 100, "float32"),
        ((1,), 100, "bfloat16"),
        ((2, 3, 5), 128, "float32"),
        ((), 128, "float32"),
    ],
    ids=str,
)
def test_leading_axes_of_any_rank(leading: tuple[int, ...], d: int, dtype: str) -> None:
    x, w = normal(*leading, d, dtype=dtype), normal(d, dtype=dtype)
    y, rstd = rms(x, w, block_r=8)
    want, want_rstd = rms_reference(x, w)
    assert y.dtype == dtype
    assert rstd.dtype == "float32"
    assert_ulps(y, want, 2)
    assert_ulps(rstd, want_rstd, 4)


@pytest.mark.parametrize("leading", [(0,), (2, 0, 3)], ids=str)
def test_zero_rows_give_empty_outputs(leading: tuple[int, ...]) -> None:
    y, rstd = rms(normal(*leading, 128), normal(128))
    assert (y.shape, rstd.shape) == ((*leading, 128), leading)


def test_statics_reach_the_body() -> None:
    x, w = normal(16, 128) * 1e-3, normal(128)
    assert_ulps(rms(x, w, eps=1.0)[0], rms_reference(x, w, 1.0)[0], 4)


@kernel
def matmul(
    x: Ref = In("*m k"),
    w: Ref = In("k n"),
    b: Ref = In("_ n"),
    y: Ref = Out("*m n"),
    acc: Ref = Acc("m n"),
    *,
    act: Callable[[jax.Array], jax.Array] = jax.nn.relu,
    m: Dim = Block(8, 128, 256, default=128),
    n: Dim = Block(128, 256, default=128),
    k: Dim = Block(128, 256, 512, default=128),
) -> None:
    acc[...] += dot(x[...], w[...])

    @pl.when(k.last)
    def _() -> None:
        y[...] = act(acc[...] + b[...].astype(F32)).astype(y.dtype)


SMALL = {"block_m": 128, "block_n": 128, "block_k": 128}  # interpret form would take the largest


def matmul_reference(x: jax.Array, w: jax.Array, b: jax.Array) -> np.ndarray:
    x, w, b = (np.asarray(a, np.float64) for a in (x, w, b))
    return np.maximum(x @ w + b, 0)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((256, 256, 256), "float32"), ((37, 300, 200), "bfloat16"), ((130, 129, 257), "float32"), ((1, 1, 1), "float32")],
    ids=str,
)
def test_summed_dims_are_filled_at_ragged_edges(sizes: tuple[int, int, int], dtype: str) -> None:
    m, k, n = sizes
    x, w, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype), normal(n, dtype=dtype)
    assert_ulps(matmul(x, w, b, **SMALL), matmul_reference(x, w, b), 32)


@pytest.mark.parametrize("order", ["m n k", "n m k"])
def test_order_is_a_config_key(order: str) -> None:
    x, w, b = normal(300, 300), normal(300, 260), normal(260)
    assert_ulps(matmul(x, w, b, order=order, **SMALL), matmul_reference(x, w, b), 32)
    assert matmul.bind(x, w, b, order=order).calls[0].grid == (3, 3, 3)
    names = matmul.bind(x, w, b, order=order).calls[0].grid_names
    assert " ".join(names) == order


def test_callable_statics() -> None:
    x, w, b = normal(40, 130), normal(130, 130), normal(130)
    want = -(np.asarray(x, np.float64) @ np.asarray(w, np.float64) + np.asarray(b, np.float64))
    assert_ulps(matmul(x, w, b, act=jnp.negative), want, 32)


def test_leading_axes_come_back_on_a_summed_kernel() -> None:
    x, w, b = normal(2, 3, 130), normal(130, 130), normal(130)
    assert_ulps(matmul(x, w, b), matmul_reference(x, w, b), 32)


@kernel
def column_sum(x: Ref = In("*r d"), total: Ref = Out("_ d", "float32", init=0.0), *, r: Dim = Block(8, 32, default=8)) -> None:
    total[...] += jnp.sum(x[...].astype(F32), axis=0, keepdims=True)


@pytest.mark.parametrize("rows", [64, 37, 5, 1])
def test_output_with_init_is_summed_over_blocks(rows: int) -> None:
    x = normal(rows, 128)
    assert_ulps(column_sum(x), np.asarray(x, np.float64).sum(0), 16)


def test_output_with_init_over_no_rows_is_its_init() -> None:
    assert (column_sum(normal(0, 128)) == 0).all()


@kernel
def row_max(x: Ref = In("r v", fill=NEG), top: Ref = Out("r _", init=NEG), *, r: Dim = Block(8), v: Dim = Block(128)) -> None:
    top[...] = jnp.maximum(top[...], jnp.max(x[...], axis=1, keepdims=True))


@pytest.mark.parametrize("v", [128, 300, 1])
def test_fill_other_than_zero(v: int) -> None:
    x = -1 - jnp.abs(normal(20, v))
    np.testing.assert_array_equal(row_max(x), x.max(axis=1))


@kernel
def masked_max(x: Ref = In("r v"), top: Ref = Out("r _", init=NEG), *, r: Dim = Block(8), v: Dim = Block(128)) -> None:
    top[...] = jnp.maximum(top[...], jnp.max(v.mask(x[...] * -1.0, 1, NEG), axis=1, keepdims=True))


@pytest.mark.parametrize("v", [128, 300])
def test_mask_of_computed_values(v: int) -> None:
    x = 1 + jnp.abs(normal(20, v))
    np.testing.assert_array_equal(masked_max(x), (-x).max(axis=1))


@kernel
def heads_sum(
    q: Ref = In("b (hk g) i d"),
    k: Ref = In("b hk i d"),
    y: Ref = Out("b (hk g) i d"),
    dk: Ref = Out("b hk i d", "float32", init=0.0),
    *,
    b: Dim = Each(),
    hk: Dim = Each(),
    i: Dim = Block(8, 16),
    g: Dim = Each(),
) -> None:
    y[...] = q[...] + k[...]
    dk[...] += q[...].astype(F32)


@pytest.mark.parametrize("heads", [(1, 1), (3, 2), (2, 4)], ids=str)
def test_grouped_axis_of_single_steps(heads: tuple[int, int]) -> None:
    hk, g = heads
    q, k = normal(2, hk * g, 20, 128), normal(2, hk, 20, 128)
    y, dk = heads_sum(q, k)
    np.testing.assert_array_equal(y, q + jnp.repeat(k, g, axis=1))
    assert_ulps(dk, np.asarray(q, np.float64).reshape(2, hk, g, 20, 128).sum(2), 8)


@kernel
def group_whole(x: Ref = In("r (e f)"), s: Ref = In("e f"), y: Ref = Out("r (e f)"), *, r: Dim = Block(8, 16)) -> None:
    y[...] = x[...] * s[...].reshape(1, -1)


def test_grouped_axis_whole() -> None:
    x, s = normal(20, 3 * 64), normal(3, 64)
    np.testing.assert_array_equal(group_whole(x, s), x * s.reshape(1, -1))


@kernel
def group_blocked(
    x: Ref = In("r (e f)"),
    s: Ref = In("e _ f"),
    y: Ref = Out("r (e f)"),
    *,
    r: Dim = Block(8),
    e: Dim = Each(),
    f: Dim = Block(128),
) -> None:
    y[...] = x[...] * s[...]


@pytest.mark.parametrize("f", [128, 256])
def test_grouped_axis_whose_last_dim_is_blocked(f: int) -> None:
    x, s = normal(20, 3 * f), normal(3, f)
    np.testing.assert_array_equal(group_blocked(x, s), x * s.reshape(1, -1))


@kernel
def scaled(
    x: Ref = In("r d"), gain: Ref = Scalar("float32"), y: Ref = Out("r d"), twice: Ref = Scratch("r d"), *, r: Dim = Block(8)
) -> None:
    twice[...] = x[...] + x[...]
    y[...] = twice[...] * gain[0]


@pytest.mark.parametrize("gain", [jnp.float32(3.0), 3, 3.0, np.float32(3)], ids=lambda g: type(g).__name__)
def test_scalar_and_scratch(gain: object) -> None:
    x = normal(20, 128)
    np.testing.assert_array_equal(scaled(x, gain), x * 6)


@kernel
def add_in_place(x: Ref = In("*r d"), dy: Ref = In("*r d"), y: Ref = Out("*r d", alias="x"), *, r: Dim = Block(8)) -> None:
    y[...] = x[...] + dy[...]


def test_alias_writes_over_its_input_and_says_so() -> None:
    x, dy = normal(2, 10, 128), normal(2, 10, 128)
    np.testing.assert_array_equal(add_in_place(x, dy), x + dy)
    assert add_in_place.bind(x, dy).calls[0].aliases == ((0, 0),)


@kernel
def tuned(x: Ref = In("r d"), y: Ref = Out("r d"), *, how: str = Choice("double", "triple"), r: Dim = Block(8)) -> None:
    y[...] = x[...] * (2 if how == "double" else 3)


def test_choice_is_a_config_key_with_a_default() -> None:
    x = normal(20, 128)
    np.testing.assert_array_equal(tuned(x), x * 2)
    np.testing.assert_array_equal(tuned(x, how="triple"), x * 3)


@kernel
def running_sum(
    x: Ref = In("b s d"), y: Ref = Out("b s d"), total: Ref = Acc("b _ d"), *, b: Dim = Each(), s: Dim = Block(8)
) -> None:
    at = jax.lax.broadcasted_iota(jnp.int32, (s.block, s.block), 0)
    lower = (at >= at.T).astype(F32)
    y[...] = total[...] + dot(lower, x[...])
    total[...] += jnp.sum(x[...], axis=0, keepdims=True)


def test_accumulator_that_is_carried_along_a_sequence() -> None:
    x = normal(2, 24, 128)
    assert_ulps(running_sum(x), np.cumsum(np.asarray(x, np.float64), axis=1), 16)
    assert running_sum.bind(x).calls[0].dimension_semantics == ("parallel", "arbitrary")


@kernel(dtypes=("int8",))
def quantized_matmul(
    x: Ref = In("m k"),
    w: Ref = In("k n"),
    scale: Ref = In("k/128 _ n", "float32"),
    y: Ref = Out("m n", "float32"),
    acc: Ref = Acc("m n"),
    *,
    m: Dim = Block(32),
    n: Dim = Block(128),
    k: Dim = Block(128, 256, 1024, default=128),
) -> None:
    for part in range(-(-k.block // 128)):
        at = slice(part * 128, min(part * 128 + 128, k.block))
        acc[...] += dot(x[:, at].astype(F32), w[at].astype(F32)) * scale[part]

    @pl.when(k.last)
    def _() -> None:
        y[...] = acc[...]


@pytest.mark.parametrize("k", [256, 600, 128, 100])
@pytest.mark.parametrize("block", [128, 1024])
def test_one_scale_for_each_128_of_a_ragged_dim(k: int, block: int) -> None:
    x, w = (jnp.asarray(RNG.integers(-100, 100, shape), jnp.int8) for shape in ((40, k), (k, 130)))
    scale = normal(-(-k // 128), 130)
    spread = np.repeat(np.asarray(scale, np.float64), 128, axis=0)[:k]
    want = np.asarray(x, np.float64) @ (np.asarray(w, np.float64) * spread)
    assert_ulps(quantized_matmul(x, w, scale, block_k=block), want, 32)


@kernel
def windows(x: Ref = In("r 128"), y: Ref = Out("r n"), *, n: int, r: Dim = Block(8)) -> None:
    y[...] = x[:, :n] * r.size


def test_exact_axis_and_size_from_a_static_int() -> None:
    x = normal(20, 128)
    np.testing.assert_array_equal(windows(x, n=16), x[:, :16] * 20)


@kernel
def no_grid(x: Ref = In("r d"), y: Ref = Out("r d")) -> None:
    y[...] = x[...] + 1


def test_kernel_without_a_grid() -> None:
    x = normal(5, 7)
    np.testing.assert_array_equal(no_grid(x), x + 1)


@kernel
def where_am_i(x: Ref = In("r d"), y: Ref = Out("r d"), *, r: Dim = Block(8)) -> None:
    inside = (r.positions(x.shape, 0) >= r.start) & (r.positions(x.shape, 0) < r.stop)
    ends = jnp.where(r.first, 100, 0) + jnp.where(r.last, 1000, 0)
    y[...] = jnp.where(inside, r.positions(x.shape, 0) + r.index * 0.0 + ends, -1.0) + (0.5 if r.ragged else 0.0)


@pytest.mark.parametrize("rows", [24, 20, 8])
def test_what_a_dim_knows(rows: int) -> None:
    got = np.asarray(where_am_i(jnp.zeros((rows, 128), F32)))[:, 0]
    at = np.arange(rows)
    want = at + np.where(at < 8, 100, 0) + np.where(at >= 8 * ((rows - 1) // 8), 1000, 0) + (0.5 if rows % 8 else 0)
    np.testing.assert_array_equal(got, want)


def test_kernels_run_inside_of_jit() -> None:
    x, w, b = normal(37, 130), normal(130, 130), normal(130)
    assert_ulps(jax.jit(matmul)(x, w, b), matmul_reference(x, w, b), 32)


def test_every_config_of_a_kernel_agrees() -> None:
    x, w, b = normal(9, 150), normal(150, 100), normal(100)
    want = matmul_reference(x, w, b)
    found = matmul.configs(matmul.signature(x, w, b))
    assert len(found) == 2 * 1 * 2
    for config in found:
        assert_ulps(matmul(x, w, b, **config), want, 32)
