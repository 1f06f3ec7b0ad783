"""The form costs nothing: on block-aligned sizes its Mosaic text is that of the same kernel in plain Pallas."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpukern.dsl import F32, NEG, Acc, Block, Bound, Dim, Each, In, Out, Ref, dot, kernel
from tpukern.lowering import lower

BF16 = jnp.bfloat16
LAST_LAST = ((1,), (1,))


def spec(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, BF16)


def mosaic_of(bound: Bound, target: str = "v5e") -> str:
    (text,) = lower(bound, target).mosaic
    return text


def mosaic_of_plain(name: str, function: Callable[..., Any], *specs: jax.ShapeDtypeStruct, target: str = "v5e") -> str:
    plain = SimpleNamespace(kernel=SimpleNamespace(name=name), function=function, specs=specs, target=None)
    (text,) = lower(plain, target).mosaic
    return text


@kernel
def rms_norm(
    x: Ref = In("*r d"),
    w: Ref = In("_ d"),
    y: Ref = Out("*r d"),
    rstd: Ref = Out("*r _", "float32", saved=True),
    *,
    eps: float = 1e-6,
    r: Dim = Block(128, 256),
) -> None:
    v = x[...].astype(F32)
    s = jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + eps)
    rstd[...] = s
    y[...] = (v * s * w[...].astype(F32)).astype(y.dtype)


def plain_rms_norm(x: jax.Array, w: jax.Array) -> Any:
    rows, d = x.shape

    def body(x: Any, w: Any, y: Any, rstd: Any) -> None:
        v = x[...].astype(F32)
        s = jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + 1e-6)
        rstd[...] = s
        y[...] = (v * s * w[...].astype(F32)).astype(y.dtype)

    return pl.pallas_call(
        body,
        grid=(rows // 256,),
        in_specs=[pl.BlockSpec((256, d), lambda r: (r, 0)), pl.BlockSpec((1, d), lambda r: (0, 0))],
        out_specs=[pl.BlockSpec((256, d), lambda r: (r, 0)), pl.BlockSpec((256, 1), lambda r: (r, 0))],
        out_shape=[jax.ShapeDtypeStruct((rows, d), x.dtype), jax.ShapeDtypeStruct((rows, 1), F32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        name="rms_norm",
    )(x, w.reshape(1, d))


@pytest.mark.parametrize("target", ["v5e", "v7x"])
def test_rms_norm_is_plain_pallas(target: str) -> None:
    specs = spec(1024, 4096), spec(4096)
    ours = mosaic_of(rms_norm.bind(*specs, block_r=256), target)
    assert ours == mosaic_of_plain("rms_norm", plain_rms_norm, *specs, target=target)


@kernel
def matmul(
    x: Ref = In("m k"),
    w: Ref = In("k n"),
    y: Ref = Out("m n"),
    acc: Ref = Acc("m n"),
    *,
    m: Dim = Block(256, 512),
    n: Dim = Block(256, 1024),
    k: Dim = Block(256, 1024),
) -> None:
    acc[...] += dot(x[...], w[...])

    @pl.when(k.last)
    def _() -> None:
        y[...] = acc[...].astype(y.dtype)


def plain_matmul(x: jax.Array, w: jax.Array) -> Any:
    (m, k), n = x.shape, w.shape[1]

    def body(x: Any, w: Any, y: Any, acc: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            acc[...] = jnp.zeros_like(acc)

        acc[...] += jnp.dot(x[...], w[...], preferred_element_type=F32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _() -> None:
            y[...] = acc[...].astype(y.dtype)

    return pl.pallas_call(
        body,
        grid=(m // 512, n // 1024, k // 1024),
        in_specs=[pl.BlockSpec((512, 1024), lambda i, j, k: (i, k)), pl.BlockSpec((1024, 1024), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((512, 1024), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_shapes=[pltpu.VMEM((512, 1024), F32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="matmul",
    )(x, w)


def test_matmul_is_plain_pallas() -> None:
    specs = spec(2048, 2048), spec(2048, 2048)
    ours = mosaic_of(matmul.bind(*specs, block_m=512, block_n=1024, block_k=1024))
    assert ours == mosaic_of_plain("matmul", plain_matmul, *specs)


def test_another_config_is_another_text() -> None:
    specs = spec(2048, 2048), spec(2048, 2048)
    ours = mosaic_of(matmul.bind(*specs, block_m=256, block_n=1024, block_k=1024))
    assert ours != mosaic_of_plain("matmul", plain_matmul, *specs)


def visible(i: Dim, causal: bool) -> tuple[int, jax.Array] | None:
    return (0, i.stop) if causal else None


@kernel
def attention(
    q: Ref = In("b (hk g) i d"),
    k: Ref = In("b hk j d"),
    v: Ref = In("b hk j e"),
    o: Ref = Out("b (hk g) i e"),
    lse: Ref = Out("b (hk g) _ i", "float32", saved=True),
    top: Ref = Acc("i 128", init=NEG),
    tot: Ref = Acc("i 128"),
    acc: Ref = Acc("i e"),
    *,
    scale: float = 1.0,
    causal: bool = False,
    b: Dim = Each(),
    hk: Dim = Each(),
    g: Dim = Each(),
    i: Dim = Block(256, 512),
    j: Dim = Block(256, 512, span=visible),
) -> None:
    @pl.when(j.live)
    def _() -> None:
        s = scale * dot(q[...], k[...], LAST_LAST)
        s = j.mask(s, 1, NEG)
        if causal:
            s = jnp.where(i.positions(s.shape, 0) >= j.positions(s.shape, 1), s, NEG)
        new = jnp.maximum(top[...], jnp.max(s, axis=1, keepdims=True))
        p = jnp.exp(s - new[:, :1])
        keep = jnp.exp(top[...] - new)
        tot[...] = keep * tot[...] + jnp.sum(p, axis=1, keepdims=True)
        acc[...] = keep[:, :1] * acc[...] + dot(p.astype(v.dtype), v[...])
        top[...] = new

    @pl.when(j.last)
    def _() -> None:
        o[...] = (acc[...] / tot[:, :1]).astype(o.dtype)
        lse[...] = (top[:, :1] + jnp.log(tot[:, :1])).T


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> Any:
    (batch, heads, seq, d), (_, key_heads, keys, e) = q.shape, v.shape
    group, size, last = heads // key_heads, 512, keys // 512 - 1

    def body(q: Any, k: Any, v: Any, o: Any, lse: Any, top: Any, tot: Any, acc: Any) -> None:
        i, j = pl.program_id(3), pl.program_id(4)

        @pl.when(j == 0)
        def _() -> None:
            top[...] = jnp.full_like(top, NEG)
            tot[...] = jnp.zeros_like(tot)
            acc[...] = jnp.zeros_like(acc)

        end = i * size + size if causal else 0

        @pl.when(j * size < end if causal else True)
        def _() -> None:
            s = 1.0 * dot(q[...], k[...], LAST_LAST)
            if causal:
                rows = jax.lax.broadcasted_iota(jnp.int32, s.shape, 0) + i * size
                columns = jax.lax.broadcasted_iota(jnp.int32, s.shape, 1) + j * size
                s = jnp.where(rows >= columns, s, NEG)
            new = jnp.maximum(top[...], jnp.max(s, axis=1, keepdims=True))
            p = jnp.exp(s - new[:, :1])
            keep = jnp.exp(top[...] - new)
            tot[...] = keep * tot[...] + jnp.sum(p, axis=1, keepdims=True)
            acc[...] = keep[:, :1] * acc[...] + dot(p.astype(v.dtype), v[...])
            top[...] = new

        @pl.when(j == last)
        def _() -> None:
            o[...] = (acc[...] / tot[:, :1]).astype(o.dtype)
            lse[...] = (top[:, :1] + jnp.log(tot[:, :1])).T

    def key_block(b: Any, h: Any, g: Any, i: Any, j: Any) -> Any:
        held = jnp.maximum(jnp.minimum(j, (i * size + size - 1) // size), 0) if causal else j
        return b, h, held, 0

    return pl.pallas_call(
        body,
        grid=(batch, key_heads, group, seq // size, keys // size),
        in_specs=[
            pl.BlockSpec((None, None, size, d), lambda b, h, g, i, j: (b, h * group + g, i, 0)),
            pl.BlockSpec((None, None, size, d), key_block),
            pl.BlockSpec((None, None, size, e), key_block),
        ],
        out_specs=[
            pl.BlockSpec((None, None, size, e), lambda b, h, g, i, j: (b, h * group + g, i, 0)),
            pl.BlockSpec((None, None, 1, size), lambda b, h, g, i, j: (b, h * group + g, 0, i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, seq, e), q.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, seq), F32),
        ],
        scratch_shapes=[pltpu.VMEM((size, 128), F32), pltpu.VMEM((size, 128), F32), pltpu.VMEM((size, e), F32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 4 + ("arbitrary",)),
        name="attention",
    )(q, k, v)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_plain_pallas(causal: bool) -> None:
    specs = spec(1, 4, 2048, 128), spec(1, 2, 2048, 128), spec(1, 2, 2048, 128)
    ours = mosaic_of(attention.bind(*specs, causal=causal, block_i=512, block_j=512))
    assert ours == mosaic_of_plain("attention", lambda q, k, v: plain_attention(q, k, v, causal=causal), *specs)


def test_causal_steps_outside_of_the_span_fetch_nothing() -> None:
    specs = spec(1, 4, 2048, 128), spec(1, 4, 2048, 128), spec(1, 4, 2048, 128)
    (call,) = attention.bind(*specs, causal=True, block_i=256, block_j=256).calls
    keys = call.inputs[1].index_map.over(call.grid)
    fetches = 1 + int((keys[1:] != keys[:-1]).any(axis=1).sum())
    assert len(keys) == 256
    assert fetches == 140  # of 256: the figure that the design measured
