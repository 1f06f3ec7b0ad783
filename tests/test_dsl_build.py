"""The `build` form: a function that only declares, and one that makes the JAX callable."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpukern.dsl import (
    F32,
    Acc,
    Block,
    Choice,
    Config,
    Dim,
    Each,
    In,
    Out,
    Prefetch,
    Ref,
    Signature,
    dot,
    interpreted,
    kernel,
    using,
)
from tpukern.errors import ConfigError, SignatureError
from tpukern.lowering import lower

RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), F32)


def build_softmax(signature: Signature, config: Config) -> Callable[..., Any]:
    """Two calls over one axis, with a block of rows of its own."""
    rows, columns = signature.sizes["r"], signature.sizes["c"]
    block = min(config["block_r"], rows)

    def maxima(x: Any, top: Any) -> None:
        top[...] = jnp.max(x[...], axis=1, keepdims=True)

    def normalised(x: Any, top: Any, y: Any) -> None:
        e = jnp.exp(x[...] - top[...])
        y[...] = e / jnp.sum(e, axis=1, keepdims=True) * (2.0 if config["twice"] else 1.0)

    row, column = pl.BlockSpec((block, columns), lambda i: (i, 0)), pl.BlockSpec((block, 1), lambda i: (i, 0))

    def call(x: jax.Array) -> jax.Array:
        common: dict[str, Any] = {"grid": (pl.cdiv(rows, block),), "interpret": interpreted()}
        top = pl.pallas_call(
            maxima, in_specs=[row], out_specs=column, out_shape=jax.ShapeDtypeStruct((rows, 1), x.dtype), **common
        )(x)
        return pl.pallas_call(
            normalised, in_specs=[row, column], out_specs=row, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), **common
        )(x, top)

    return call


@kernel(build=build_softmax)
def softmax(
    x: Ref = In("r c"), y: Ref = Out("r c"), *, twice: bool = Choice(False, True), r: Dim = Block(8, 64, default=8)
) -> None:
    """Softmax over the last axis."""


def test_build_makes_its_own_calls() -> None:
    x = normal(30, 130)
    want = np.asarray(jax.nn.softmax(x, axis=-1))
    np.testing.assert_allclose(softmax(x), want, rtol=1e-5)
    np.testing.assert_allclose(softmax(x, twice=True, block_r=8), 2 * want, rtol=1e-5)
    assert [call.grid for call in softmax.bind(x).calls] == [(4,), (4,)]
    assert [call.interpret for call in softmax.bind(x).calls] == [False, False]


def test_build_has_the_declared_config_space() -> None:
    assert [str(config) for config in softmax.configs(softmax.signature(normal(30, 130)))] == [
        "block_r=8,twice=False",
        "block_r=8,twice=True",
        "block_r=64,twice=False",
        "block_r=64,twice=True",
    ]
    with pytest.raises(ConfigError) as caught:
        softmax.bind(normal(30, 130), block_c=8)
    assert str(caught.value) == (
        "softmax[config]: no keyword 'block_c'; expected one of ['block_r', 'twice']. Did you mean 'block_r'."
    )
    with pytest.raises(ConfigError) as caught:
        softmax.bind(normal(30, 130), order="r")
    assert (
        str(caught.value) == "softmax[config]: no keyword 'order'; expected one of ['block_r', 'twice']. Did you mean 'order'."
    )


def test_build_lowers_for_a_chip() -> None:
    lowered = lower(softmax.bind(jax.ShapeDtypeStruct((64, 128), F32)), "v5e")
    assert len(lowered.mosaic) == 2


@kernel
def grouped(
    group: Ref = Prefetch("t"),
    block: Ref = Prefetch("t"),
    ends: Ref = Prefetch("e1"),
    x: Ref = In("m:block[t] k"),
    w: Ref = In("e:group[t] k n"),
    y: Ref = Out("m:block[t] n"),
    acc: Ref = Acc("m:block[t] n"),
    *,
    e: Dim = Each(),
    n: Dim = Block(128, 256),
    t: Dim = Each(),
    m: Dim = Block(8, 16),
    k: Dim = Block(128),
) -> None:
    acc[...] += dot(x[...], w[...])

    @pl.when(k.last)
    def _() -> None:
        at = group[t.index]
        row = jax.lax.broadcasted_iota(jnp.int32, y.shape, 0) + block[t.index] * m.block
        y[...] = jnp.where((row >= ends[at]) & (row < ends[at + 1]), acc[...], y[...])


def build_grouped(signature: Signature, config: Config) -> Callable[..., Any]:
    """Finds each tile's group from the group sizes, for the block that was chosen, then calls the tile kernel."""
    size, rows, groups = config["block_m"], signature.sizes["m"], signature.sizes["e"]
    tiles = -(-rows // size) + groups - 1

    def call(counts: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts)]).astype(jnp.int32)
        of_group = jnp.where(counts > 0, (ends[1:] + size - 1) // size - ends[:-1] // size, 0)
        group = jnp.repeat(jnp.arange(groups, dtype=jnp.int32), of_group, total_repeat_length=tiles)
        first = jnp.cumsum(of_group) - of_group
        block = ends[group] // size + jnp.arange(tiles, dtype=jnp.int32) - first[group]
        block = jnp.minimum(block, -(-rows // size) - 1).astype(jnp.int32)
        return grouped(group, block, ends, x, w, block_m=size)

    return call


@kernel(build=build_grouped)
def grouped_matmul(
    counts: Ref = Prefetch("e"), x: Ref = In("m k"), w: Ref = In("e k n"), y: Ref = Out("m n"), *, m: Dim = Block(8, 16)
) -> None: ...


@pytest.mark.parametrize("block_m", [8, 16])
def test_build_that_composes_a_tile_kernel(block_m: int) -> None:
    counts = [10, 0, 22]
    x, w = normal(32, 128), normal(3, 128, 130)
    want = np.concatenate([np.asarray(x[lo:hi]) @ np.asarray(w[e]) for e, lo, hi in ((0, 0, 10), (2, 10, 32))])
    got = grouped_matmul(jnp.asarray(counts, jnp.int32), x, w, block_m=block_m)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_config_of_a_build_names_its_own_blocks_and_those_of_what_it_calls() -> None:
    arrays = jnp.asarray([10, 0, 22], jnp.int32), normal(32, 128), normal(3, 128, 300)
    bound = grouped_matmul.bind(*arrays, config=Config.parse("block_m=16,grouped.block_n=128"))
    assert str(bound.config) == "block_m=16,grouped.block_n=128,grouped.block_k=128"
    (call,) = bound.calls
    assert (call.name, call.grid) == ("grouped", (3, 4, 1))
    assert len(grouped_matmul.configs(bound.signature)) == 2 * 2
    with using(configs={"grouped_matmul": {"grouped.block_n": 128, "block_m": 8}}):
        jaxpr = jax.make_jaxpr(grouped_matmul)(*arrays)
    (equation,) = [e for e in jaxpr.eqns if e.primitive.name == "pallas_call"]
    assert equation.params["grid_mapping"].grid == (3, 6, 1)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: (x, x), "bad[signature]: build gave 2 outputs; expected 1: y: float32[8,128]."),
        (lambda x: x[:4], "bad[signature]: build gave float32[4,128] for y; expected y: float32[8,128]."),
        (lambda x: x.astype(jnp.bfloat16), "bad[signature]: build gave bfloat16[8,128] for y; expected y: float32[8,128]."),
    ],
    ids=["count", "shape", "dtype"],
)
def test_build_that_returns_the_wrong_thing(result: Callable[..., Any], message: str) -> None:
    @kernel(build=lambda signature, config: result)
    def bad(x: Ref = In("r d"), y: Ref = Out("r d")) -> None: ...

    with pytest.raises(SignatureError) as caught:
        bad(normal(8, 128))
    assert str(caught.value) == message


def test_build_may_move_data_itself() -> None:
    """Refs left in HBM and a DMA of one's own: what the tile form has no words for."""

    def build(signature: Signature, config: Config) -> Callable[..., Any]:
        def body(x: Any, y: Any, done: Any) -> None:
            copy = pltpu.make_async_copy(x, y, done)
            copy.start()
            copy.wait()

        return pl.pallas_call(
            body,
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            out_shape=jax.ShapeDtypeStruct(signature.outputs[0].shape, F32),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
            interpret=interpreted(),
        )

    @kernel(build=build)
    def copied(x: Ref = In("r d"), y: Ref = Out("r d")) -> None: ...

    x = normal(16, 128)
    with using(interpret=pltpu.InterpretParams()):
        np.testing.assert_array_equal(copied(x), x)
    assert copied.bind(x).calls[0].inputs[0].memory_space == "any"
