"""Tables in SMEM, looked-up axes, spans: what decides at run time which block a step sees."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from tpukern.dsl import F32, NEG, Acc, Block, Dim, Each, In, Out, Prefetch, Ref, dot, kernel
from tpukern.errors import SignatureError

RNG = np.random.default_rng(0)
LAST_LAST = ((1,), (1,))


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), F32)


def assert_close(got: jax.Array, want: Any) -> None:
    """To within 32 ulps of the largest output."""
    want = np.asarray(want, np.float64)
    assert got.shape == want.shape
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=32 * 2**-23 * np.abs(want).max())


@kernel
def grouped_matmul(
    group: Ref = Prefetch("t"),  # group of tile t
    block: Ref = Prefetch("t"),  # row block of tile t
    ends: Ref = Prefetch("e1"),  # e + 1 row offsets
    x: Ref = In("m:block[t] k"),
    w: Ref = In("e:group[t] k n"),
    y: Ref = Out("m:block[t] n"),
    acc: Ref = Acc("m:block[t] n"),
    *,
    e: Dim = Each(),
    n: Dim = Block(128, 256, default=128),
    t: Dim = Each(),
    m: Dim = Block(8, 128, default=8),
    k: Dim = Block(128, 256, default=128),
) -> None:
    acc[...] += dot(x[...], w[...])

    @pl.when(k.last)
    def _() -> None:
        at = group[t.index]
        row = jax.lax.broadcasted_iota(jnp.int32, y.shape, 0) + block[t.index] * m.block
        mine = (row >= ends[at]) & (row < ends[at + 1])
        y[...] = jnp.where(mine, acc[...], y[...].astype(F32)).astype(y.dtype)


def tiles(counts: list[int], block: int) -> tuple[jax.Array, ...]:
    """The (group, row block) of every tile, in row order, for groups of these sizes."""
    ends = np.concatenate([[0], np.cumsum(counts)])
    pairs = [
        (group, at)
        for group, (lo, hi) in enumerate(itertools.pairwise(ends))
        for at in range(lo // block, -(-hi // block) if hi > lo else lo // block)
    ]
    return tuple(jnp.asarray(column, jnp.int32) for column in (*zip(*pairs, strict=True), ends))


@pytest.mark.parametrize("counts", [[10, 0, 22], [3, 5, 8], [0, 37, 1]], ids=str)
def test_grouped_matmul_with_empty_groups_and_shared_row_blocks(counts: list[int]) -> None:
    rows, sizes = sum(counts), (200, 130)
    x, w = normal(rows, sizes[0]), normal(len(counts), *sizes)
    group, block, ends = tiles(counts, 8)
    want = np.concatenate(
        [np.asarray(x[lo:hi], np.float64) @ np.asarray(w[e], np.float64) for e, (lo, hi) in enumerate(itertools.pairwise(ends))]
    )
    assert_close(grouped_matmul(group, block, ends, x, w, block_m=8), want)
    (call,) = grouped_matmul.bind(group, block, ends, x, w).calls
    assert dict(zip(call.grid_names, call.dimension_semantics, strict=True)) == {
        "n": "parallel",
        "t": "arbitrary",
        "k": "arbitrary",
    }


@kernel
def page_sum(
    page: Ref = Prefetch("t"), x: Ref = In("p:page[t] d"), y: Ref = Out("_ d", init=0.0), *, t: Dim = Each(), p: Dim = Block(8)
) -> None:
    y[...] += jnp.sum(x[...], axis=0, keepdims=True)


def test_a_looked_up_block_that_is_cut_short_is_filled_where_it_is_summed_over() -> None:
    x = normal(20, 128)
    assert_close(page_sum(jnp.asarray([2, 0, 2], jnp.int32), x), (np.asarray(x[:8]) + 0).sum(0) + 2 * np.asarray(x[16:]).sum(0))
    text = page_sum.bind(jnp.zeros(3, jnp.int32), x).text().splitlines()
    assert text[-2:] == [
        '  x "p:page[t] d" is filled with 0 past the end of p:page[t]',
        '  y "_ d" is set to 0 at the first step of t',
    ]


def filled(b: Dim, lengths: Any) -> tuple[None, Any]:
    return None, lengths[b.index]


@kernel
def paged_attention(
    page: Ref = Prefetch("b j"),
    lengths: Ref = Prefetch("b"),
    q: Ref = In("b h d"),
    keys: Ref = In("p:page[b,j] s d"),
    values: Ref = In("p:page[b,j] s d"),
    o: Ref = Out("b h d"),
    top: Ref = Acc("b h _", init=NEG),
    tot: Ref = Acc("b h _"),
    acc: Ref = Acc("b h d"),
    *,
    s: int,
    b: Dim = Each(),
    j: Dim = Each(span=lambda b, lengths, s: (0, (lengths[b.index] + s - 1) // s)),
    p: Dim = Each(),
) -> None:
    @pl.when(j.live)
    def _() -> None:
        score = dot(q[...], keys[...], LAST_LAST)
        at = jax.lax.broadcasted_iota(jnp.int32, score.shape, 1) + j.index * s
        score = jnp.where(at < lengths[b.index], score, NEG)
        new = jnp.maximum(top[...], jnp.max(score, axis=1, keepdims=True))
        weight = jnp.where(score > NEG / 2, jnp.exp(score - new), 0.0)
        keep = jnp.exp(top[...] - new)
        tot[...] = keep * tot[...] + jnp.sum(weight, axis=1, keepdims=True)
        acc[...] = keep * acc[...] + dot(weight, values[...])
        top[...] = new

    @pl.when(j.last)
    def _() -> None:
        o[...] = acc[...] / jnp.maximum(tot[...], 1e-30)


def paged_case() -> tuple[Any, ...]:
    lengths, size, heads, width = [5, 0, 24], 8, 8, 128
    page = jnp.asarray([[3, 1, 0], [0, 0, 0], [2, 4, 5]], jnp.int32)
    q, keys, values = normal(3, heads, width) / 8, normal(6, size, width), normal(6, size, width)
    want = np.zeros((3, heads, width))
    for b, length in enumerate(lengths):
        if length:
            kk, vv = (np.asarray(a, np.float64)[page[b]].reshape(-1, width)[:length] for a in (keys, values))
            score = np.asarray(q[b], np.float64) @ kk.T
            weight = np.exp(score - score.max(1, keepdims=True))
            want[b] = weight / weight.sum(1, keepdims=True) @ vv
    return page, jnp.asarray(lengths, jnp.int32), q, keys, values, want


def test_paged_attention_with_lengths_as_span() -> None:
    *arrays, want = paged_case()
    assert_close(paged_attention(*arrays, s=8), want)


def test_span_holds_the_index_of_looked_up_pages() -> None:
    page, lengths, *rest, _ = paged_case()
    (call,) = paged_attention.bind(page, lengths, *rest, s=8).calls
    pages = call.inputs[1].index_map.over(call.grid, (np.asarray(page), np.asarray(lengths)))[:, 0]
    np.testing.assert_array_equal(pages, [3, 3, 3, 0, 0, 0, 2, 4, 5])


def windowed(i: Dim, back: int) -> tuple[Any, Any]:
    return i.start - back, i.stop


@kernel
def window_sum(
    x: Ref = In("j d"),
    z: Ref = In("i d"),
    y: Ref = Out("i d", init=0.0),
    *,
    back: int = 200,
    i: Dim = Block(128),
    j: Dim = Block(128, span=windowed),
) -> None:
    """Row i of y is the sum of the rows i - back .. i of x."""

    @pl.when(j.live)
    def _() -> None:
        shape = (i.block, j.block)
        far = i.positions(shape, 0) - j.positions(shape, 1)
        y[...] += dot(jnp.where((far >= 0) & (far <= back), 1.0, 0.0), x[...])


@pytest.mark.parametrize(("rows", "back"), [(512, 100), (600, 200), (600, 2000)])
def test_span_with_both_ends_over_a_ragged_dim(rows: int, back: int) -> None:
    x, z = normal(rows, 128), normal(rows, 128)
    total = np.concatenate([np.zeros((1, 128)), np.cumsum(np.asarray(x, np.float64), axis=0)])
    want = total[1:] - total[np.maximum(np.arange(rows) - back, 0)]
    assert_close(window_sum(x, z, back=back), want)


def test_the_ragged_tail_is_filled_where_it_is_fetched_not_on_the_last_step() -> None:
    """With 600 rows the last query block holds key block 4 (cut short) at steps before the last one."""
    x, z = normal(600, 128), normal(128, 128)

    @kernel
    def prefix_sum(
        x: Ref = In("j d"),
        z: Ref = In("i d"),
        y: Ref = Out("i d", init=0.0),
        *,
        i: Dim = Block(128),
        j: Dim = Block(128, span=lambda: (512, None)),
    ) -> None:
        y[...] += jnp.sum(x[...], axis=0, keepdims=True) * 0 + z[...] * 0

        @pl.when(j.live)
        def _() -> None:
            y[...] += jnp.sum(x[...], axis=0, keepdims=True)

    want = np.broadcast_to(np.asarray(x[512:], np.float64).sum(0), (128, 128))
    assert_close(prefix_sum(x, z), want)


@kernel
def after(
    x: Ref = In("j d"),
    z: Ref = In("i d"),
    y: Ref = Out("i d", init=0.0),
    *,
    i: Dim = Block(128),
    j: Dim = Block(128, span=lambda i: (i.start, None)),
) -> None:
    @pl.when(j.live)
    def _() -> None:
        shape = (i.block, j.block)
        seen = i.positions(shape, 0) <= j.positions(shape, 1)
        y[...] += dot(jnp.where(seen, 1.0, 0.0), x[...])


@pytest.mark.parametrize(("rows", "keys"), [(300, 300), (600, 200), (200, 600)])
def test_span_that_begins_past_the_end_is_empty(rows: int, keys: int) -> None:
    x, z = normal(keys, 128), normal(rows, 128)
    tail = np.cumsum(np.asarray(x, np.float64)[::-1], axis=0)[::-1]
    want = np.zeros((rows, 128))
    want[: min(rows, keys)] = tail[:rows]
    assert_close(after(x, z), want)


@pytest.mark.parametrize(
    ("span", "gave"),
    [(lambda i: i.stop, "an array"), (lambda i: (0, 1, i.stop), "3 values"), (lambda i: [0, 1], "a list")],
    ids=["array", "three", "list"],
)
def test_span_of_the_wrong_form(span: Callable[[Dim], Any], gave: str) -> None:
    @kernel
    def f(x: Ref = In("i j"), y: Ref = Out("i _", init=0.0), *, i: Dim = Block(128), j: Dim = Block(128, span=span)) -> None:
        y[...] += jnp.sum(x[...], axis=1, keepdims=True)

    with pytest.raises(SignatureError) as caught:
        f(normal(256, 256))
    assert (
        str(caught.value) == f"f[signature]: the span of 'j' gave {gave}; expected None or a pair (first, one past the last)."
    )


@kernel
def asks_index(
    page: Ref = Prefetch("t"), x: Ref = In("p:page[t] s d"), y: Ref = Out("t s d"), *, t: Dim = Each(), p: Dim = Each()
) -> None:
    y[...] = x[...] * p.index


def test_a_looked_up_dim_has_no_index() -> None:
    with pytest.raises(SignatureError) as caught:
        asks_index(jnp.zeros(2, jnp.int32), normal(3, 8, 128))
    assert str(caught.value) == (
        "asks_index[signature]: 'p' is looked up in a table, so it has no index of its own; expected size, block, count and "
        "ragged only."
    )
