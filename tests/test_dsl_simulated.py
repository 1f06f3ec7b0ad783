"""The same kernels in Pallas' TPU interpreter: memory that nobody wrote is NaN, and races are reported."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpukern.dsl import F32, NEG, Acc, Block, Dim, Each, In, Out, Prefetch, Ref, Scalar, dot, kernel, using

RNG = np.random.default_rng(0)
LAST_LAST = ((1,), (1,))


def normal(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), dtype)


@pytest.fixture(autouse=True)
def _simulated(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    with using(interpret=pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")):
        yield
    assert "RACE" not in capfd.readouterr().out


def assert_close(got: jax.Array, want: Any, atol: float = 1e-4) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=0, atol=atol)


@kernel
def matmul(
    x: Ref = In("*m k"),
    w: Ref = In("k n"),
    gain: Ref = Scalar("float32"),
    y: Ref = Out("*m n"),
    acc: Ref = Acc("m n"),
    *,
    m: Dim = Block(8, 128),
    n: Dim = Block(128),
    k: Dim = Block(128),
) -> None:
    acc[...] += dot(x[...], w[...])

    @pl.when(k.last)
    def _() -> None:
        y[...] = (acc[...] * gain[0]).astype(y.dtype)


def test_ragged_sums() -> None:
    x, w = normal(13, 200), normal(200, 140)
    assert_close(matmul(x, w, 2, block_m=8), 2 * np.asarray(x, np.float64) @ np.asarray(w, np.float64))


def test_what_is_not_declared_as_a_sum_is_not_filled() -> None:
    """The check that the interpreter bites: an output that names the ragged dim gets no fill, and NaN shows."""

    @kernel
    def leaks(x: Ref = In("r d"), y: Ref = Out("r d"), *, r: Dim = Block(8)) -> None:
        y[...] = x[...] + jnp.sum(x[...], axis=0, keepdims=True)

    got = np.asarray(leaks(normal(12, 128)))
    assert np.isfinite(got[:8]).all()
    assert np.isnan(got[8:]).all()


@kernel
def column_sum(x: Ref = In("*r d"), total: Ref = Out("_ d", "float32", init=0.0), *, r: Dim = Block(8)) -> None:
    total[...] += jnp.sum(x[...].astype(F32), axis=0, keepdims=True)


def test_output_with_init() -> None:
    x = normal(2, 10, 128)
    assert_close(column_sum(x), np.asarray(x, np.float64).sum((0, 1)))


def visible(i: Dim, causal: bool) -> tuple[int, jax.Array] | None:
    return (0, i.stop) if causal else None


@kernel
def attention(
    q: Ref = In("b (hk g) i d"),
    k: Ref = In("b hk j d"),
    v: Ref = In("b hk j e"),
    o: Ref = Out("b (hk g) i e"),
    lse: Ref = Out("b (hk g) _ i", "float32", saved=True),
    top: Ref = Acc("i _", init=NEG),
    tot: Ref = Acc("i _"),
    acc: Ref = Acc("i e"),
    *,
    causal: bool = False,
    b: Dim = Each(),
    hk: Dim = Each(),
    g: Dim = Each(),
    i: Dim = Block(128),
    j: Dim = Block(128, span=visible),
) -> None:
    @pl.when(j.live)
    def _() -> None:
        s = j.mask(dot(q[...], k[...], LAST_LAST), 1, NEG)
        if causal:
            s = jnp.where(i.positions(s.shape, 0) >= j.positions(s.shape, 1), s, NEG)
        new = jnp.maximum(top[...], jnp.max(s, axis=1, keepdims=True))
        p = jnp.exp(s - new)
        keep = jnp.exp(top[...] - new)
        tot[...] = keep * tot[...] + jnp.sum(p, axis=1, keepdims=True)
        acc[...] = keep * acc[...] + dot(p.astype(v.dtype), v[...])
        top[...] = new

    @pl.when(j.last)
    def _() -> None:
        o[...] = (acc[...] / tot[...]).astype(o.dtype)
        lse[...] = (top[...] + jnp.log(tot[...])).T


def test_causal_attention_over_ragged_sequences_with_grouped_heads() -> None:
    q, k, v = normal(1, 4, 200, 64) / 8, normal(1, 2, 200, 64), normal(1, 2, 200, 100)
    o, lse = attention(q, k, v, causal=True)
    kk, vv = (np.repeat(np.asarray(a, np.float64), 2, axis=1) for a in (k, v))
    s = np.einsum("bhid,bhjd->bhij", np.asarray(q, np.float64), kk)
    s = np.where(np.tril(np.ones((200, 200))) > 0, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    assert_close(o, np.einsum("bhij,bhje->bhie", p / p.sum(-1, keepdims=True), vv))
    assert_close(lse, np.log(p.sum(-1)) + s.max(-1))


@kernel
def gathered(
    page: Ref = Prefetch("t"), x: Ref = In("p:page[t] s d"), y: Ref = Out("t s d"), *, t: Dim = Each(), p: Dim = Each()
) -> None:
    y[...] = x[...]


def test_lookup() -> None:
    x = normal(5, 8, 128)
    assert_close(gathered(jnp.asarray([4, 0, 4], jnp.int32), x), np.asarray(x)[[4, 0, 4]])


@kernel
def updated(x: Ref = In("r d"), dx: Ref = In("r d"), y: Ref = Out("r d", alias="x"), *, r: Dim = Block(8)) -> None:
    y[...] = x[...] + dx[...]


def test_alias() -> None:
    """Whole blocks only: jax 0.10.2's interpreter returns a padded array where an alias meets a block cut short."""
    x, dx = normal(16, 128), normal(16, 128)
    assert_close(updated(x, dx), np.asarray(x) + np.asarray(dx), atol=1e-6)


def test_forms_do_not_share_traces() -> None:
    """The same bound kernel in plain interpret form, then simulated: JAX must not hand out the first trace again."""
    x = normal(12, 128)
    with using(interpret=True):
        first = column_sum(x)
    with using(interpret=pltpu.InterpretParams(skip_floating_point_ops=True)):
        assert not np.isfinite(np.asarray(column_sum(x))).any()
    assert_close(column_sum(x), first)
