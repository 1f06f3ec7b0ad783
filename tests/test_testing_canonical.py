"""Programs that compute the same read alike, and no others."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpukern.testing import canonical

X = jax.ShapeDtypeStruct((16, 128), jnp.float32)


def digest(function: Callable[..., Any]) -> str:
    return canonical.digest(jax.make_jaxpr(function)(X))


def called(body: Callable[..., None], at: Callable[[Any], Any] = lambda i: (i, 0), scratch: Any = ()) -> str:
    block = pl.BlockSpec((8, 128), at)
    call = pl.pallas_call(
        body, grid=(2,), in_specs=[block], out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)), out_shape=X,
        scratch_shapes=scratch, name="body",
    )  # fmt: skip
    return digest(call)


def plain(x: Any, y: Any) -> None:
    a, b = x[...], x[...] * 2.0
    y[...] = jnp.exp(a) + b


def test_order_doubles_and_what_nothing_uses_make_no_difference() -> None:
    def otherwise(x: Any, y: Any) -> None:
        a, c = x[...], x[...]
        jnp.sin(a)
        b = c * 2.0
        y[...] = jnp.exp(a) + b

    assert called(plain) == called(otherwise)
    assert digest(lambda x: (x + 1) * (x + 1)) == digest(lambda x: (y := x + 1) * y)


def test_other_operations_operands_and_constants_do() -> None:
    programs: list[Callable[[Any], Any]] = [
        lambda x: x - 1.0, lambda x: 1.0 - x, lambda x: x - 2.0, lambda x: (x - 1.0).astype("bfloat16"),
        lambda x: x - np.arange(128.0, dtype="float32"), lambda x: x - np.arange(1.0, 129.0, dtype="float32"),
        lambda x: jnp.where(x > 0, x, 0), lambda x: jnp.where(x >= 0, x, 0), lambda x: (x, x - 1), lambda x: (x - 1, x),
        lambda x: x[:8], lambda x: x[8:], lambda x: jax.lax.fori_loop(0, 3, lambda i, v: v + i, x),
        lambda x: jax.lax.fori_loop(0, 4, lambda i, v: v + i, x), lambda x: jax.lax.cond(x[0, 0] > 0, jnp.exp, jnp.sin, x),
        lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.exp, x),
    ]  # fmt: skip
    assert len({digest(p) for p in programs}) == len(programs)


def swapped(x: Any, y: Any) -> None:
    y[...] = x[...] * 2.0
    y[...] = jnp.exp(x[...])


def last_first(x: Any, y: Any) -> None:
    y[...] = jnp.exp(x[...])
    y[...] = x[...] * 2.0


def read_between(x: Any, y: Any) -> None:
    y[...] = x[...] * 2.0
    y[...] = y[...] + x[...]


def read_before(x: Any, y: Any) -> None:
    before = y[...]
    y[...] = x[...] * 2.0
    y[...] = before + x[...]


def test_the_order_of_reads_and_writes_and_the_index_maps_do() -> None:
    bodies = (plain, swapped, last_first, read_between, read_before)
    assert len({called(body) for body in bodies}) == len(bodies)
    assert called(plain) != called(plain, lambda i: (1 - i, 0))


@pytest.mark.parametrize("left_out", ["start", "wait"])
def test_copies_count_though_nothing_uses_them(left_out: str) -> None:
    def copying(*steps: str) -> Callable[..., None]:
        def body(x: Any, y: Any, window: Any, arrived: Any) -> None:
            copy = pltpu.make_async_copy(x, window, arrived)
            for step in steps:
                getattr(copy, step)()
            y[...] = window[...]

        return body

    scratch = [pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA]
    whole = called(copying("start", "wait"), scratch=scratch)
    assert whole == called(copying("start", "wait"), scratch=scratch)
    assert whole != called(copying(*({"start", "wait"} - {left_out})), scratch=scratch)
