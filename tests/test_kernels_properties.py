"""What single kernels promise besides agreeing with their reference."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tpukern
from tpukern import kernels
from tpukern.dsl import Kernel, Workload, using
from tpukern.errors import ConfigError
from tpukern.kernels.matmul import ACTIVATIONS, linear, matmul, matmul_nt, matmul_tn

KERNELS: list[Kernel] = [k for name in kernels.__all__ if (k := getattr(kernels, name)).frontend == "pallas"]
SMALL = {"block_i": 128, "block_j": 128}
SMALL_ATTENTION = {
    "flash_attention": SMALL,
    "flash_attention_backward": {f"flash_attention_{part}.{key}": v for part in ("dkv", "dq") for key, v in SMALL.items()},
}


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def tensor(array: jax.Array) -> torch.Tensor:
    return torch.tensor(np.asarray(array, np.float64))


def test_workloads_are_named_once_and_say_where_they_come_from() -> None:
    for kernel in KERNELS:
        names = [workload.name for workload in kernel.workloads]
        assert len(set(names)) == len(names) > 0
        assert all("config" in workload.source for workload in kernel.workloads)
        assert kernel.tolerance.keys() >= set(kernel.dtypes)


@pytest.mark.parametrize("kernel", [matmul, matmul_nt, matmul_tn, linear], ids=lambda k: k.name)
def test_no_operand_is_transposed_in_memory(kernel: Kernel) -> None:
    for one in kernel.directions.values():
        bound = one.bind_signature(one.workload_signature(Workload("small", m=256, n=384, k=512)), target="v6e")
        assert "stablehlo.transpose" not in tpukern.lower(bound).stablehlo


@pytest.mark.parametrize("act", list(ACTIVATIONS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations(act: str, dtype: str) -> None:
    x, w, b = normal(37, 300, dtype=dtype), normal(70, 300, seed=1, dtype=dtype), normal(70, seed=2, dtype=dtype)
    y, pullback = jax.vjp(lambda *arrays: linear(*arrays, act=act), x, w, b)
    dy = normal(37, 70, seed=3, dtype=dtype)
    exact = [tensor(array).requires_grad_() for array in (x, w, b)]
    assert linear.reference is not None
    want = linear.reference(*exact, act=act)
    wanted = torch.autograd.grad(want, exact, tensor(dy))
    limit = linear.tolerance[dtype] * float(jnp.finfo(dtype).eps)
    if dtype == "float32":  # a unit grows with the root of what is summed: see tpukern.testing.ulp
        limit *= 1 + 300**0.5
    for got, right in zip((y, *pullback(dy)), (want, *wanted), strict=True):
        np.testing.assert_allclose(
            np.asarray(got, np.float64), right.detach(), rtol=0, atol=limit * float(right.detach().abs().max())
        )


def test_unknown_activation() -> None:
    with pytest.raises(ConfigError) as error:
        linear(normal(8, 16), normal(8, 16), normal(8), act="selu")
    assert str(error.value) == (
        "linear[config]: act = 'selu'; expected one of ['none', 'relu', 'silu', 'gelu', 'gelu_tanh']. Did you mean 'silu'."
    )


def test_rms_norm_keeps_one_statistic_a_row() -> None:
    x, w = normal(3, 5, 100, dtype="bfloat16"), normal(100, dtype="bfloat16")
    _, rstd = kernels.rms_norm(x, w, eps=1e-3, block_r=8)
    assert rstd.dtype == jnp.float32
    want = 1 / np.sqrt(np.square(np.asarray(x, np.float64)).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(np.asarray(rstd, np.float64), want, rtol=4 * 2.0**-23)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_keeps_the_logsumexp(causal: bool) -> None:
    q, k, v = normal(2, 4, 300, 64), normal(2, 2, 300, 64, seed=1), normal(2, 2, 300, 64, seed=2)
    _, lse = kernels.flash_attention(q, k, v, causal=causal, **SMALL)
    scores = tensor(q) @ tensor(k).repeat_interleave(2, 1).mT / 8
    if causal:
        scores = scores.masked_fill(torch.ones(300, 300).tril() == 0, -torch.inf)
    np.testing.assert_allclose(np.asarray(lse, np.float64), torch.logsumexp(scores, -1), rtol=0, atol=2e-6)


def attention_and_gradients(q: jax.Array, k: jax.Array, v: jax.Array, **statics: Any) -> tuple[jax.Array, ...]:
    with using(configs=SMALL_ATTENTION):
        o, pullback = jax.vjp(lambda *arrays: kernels.flash_attention(*arrays, **statics)[0], q, k, v)
        return o, *pullback(jnp.ones_like(o))


def test_attention_with_huge_scores() -> None:
    """Scores of some thousands, whose exponentials no float holds: one key takes all, and the tail's zeros take nothing.

    The log-sum-exp is kept in float32: at 7,000 its rounding alone moves a weight by 1e-3 of itself.
    """
    q, k, v = 30 * normal(1, 1, 200, 64), 30 * normal(1, 1, 200, 64, seed=1), normal(1, 1, 200, 64, seed=2)
    exact = [tensor(array).requires_grad_() for array in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*exact)
    wanted = torch.autograd.grad(want.sum(), exact)
    for got, right in zip(attention_and_gradients(q, k, v), (want, *wanted), strict=True):
        scale = float(right.detach().abs().max())
        np.testing.assert_allclose(got, right.detach(), rtol=0, atol=4e-3 * scale)


def test_attention_with_very_negative_scores() -> None:
    """Rows whose log-sum-exp is far below zero: a filled key would weigh 2**-lse, which is infinite."""
    q, k, v = jnp.full((1, 1, 200, 64), 30.0), jnp.full((1, 1, 200, 64), -30.0), normal(1, 1, 200, 64)
    o, dq, dk, dv = attention_and_gradients(q, k, v)
    np.testing.assert_allclose(o, jnp.broadcast_to(v.mean(2, keepdims=True), o.shape), rtol=0, atol=1e-5)
    np.testing.assert_allclose(dv, jnp.ones_like(dv), rtol=2e-3)
    assert np.isfinite(np.asarray(dq)).all()
    assert np.isfinite(np.asarray(dk)).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e5, 1e16, 1e18])
@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_attention_takes_the_greatest_score_whatever_its_size(size: float, scale: float, causal: bool) -> None:
    """Scores of 1e10 to 1e37, also negative: no key that is left out may weigh more, and no rounding be taken for one."""
    q, k, v = size * normal(1, 1, 200, 64), size * normal(1, 1, 200, 64, seed=1), normal(1, 1, 200, 64, seed=2)
    o, _ = kernels.flash_attention(q, k, v, causal=causal, scale=scale, **SMALL)
    scores = scale * tensor(q) @ tensor(k).mT
    scores = scores.masked_fill(torch.ones(200, 200).tril() == 0, -torch.inf) if causal else scores
    np.testing.assert_allclose(o, scores.softmax(-1) @ tensor(v), rtol=0, atol=1e-6)
    o, _ = kernels.flash_attention(jnp.abs(q), -jnp.sign(scale) * jnp.abs(k), v, causal=True, scale=scale, **SMALL)
    np.testing.assert_array_equal(np.asarray(o)[0, 0, 0], np.asarray(v)[0, 0, 0])


def test_attention_of_nothing_is_zero() -> None:
    """As ATen has it, where all scores of a row are -inf."""
    q, k, v = jnp.ones((1, 1, 200, 64)), jnp.full((1, 1, 200, 64), -jnp.inf), normal(1, 1, 200, 64)
    o, _ = kernels.flash_attention(q, k, v, **SMALL)
    np.testing.assert_array_equal(o, jnp.zeros_like(v))


def test_attention_lets_nan_through_to_its_row_only() -> None:
    q, k, v = normal(1, 1, 200, 64), normal(1, 1, 200, 64, seed=1), normal(1, 1, 200, 64, seed=2)
    o, _ = kernels.flash_attention(q.at[0, 0, 150, 3].set(jnp.nan), k, v, **SMALL)
    assert np.isnan(np.asarray(o)[0, 0, 150]).all()
    assert np.isfinite(np.delete(np.asarray(o), 150, axis=2)).all()


def test_causal_blocks_above_the_diagonal_are_not_fetched() -> None:
    """Of 4 x 4 blocks of keys a causal call needs 10, and holds the first one over from one row of blocks to the next."""
    sizes = {"b": 1, "hk": 1, "g": 1, "i": 512, "j": 512, "d": 64, "e": 64}
    fetches = {}
    for causal in (False, True):
        signature = kernels.flash_attention.workload_signature(Workload("case", causal=causal, **sizes))
        (call,) = kernels.flash_attention.bind_signature(signature, SMALL).calls
        assert call.grid == (1, 1, 1, 4, 4)
        _, keys, _ = call.inputs
        steps = keys.index_map.over((1, 1, 1, 4, 4))
        fetches[causal] = 1 + int((steps[1:] != steps[:-1]).any(axis=1).sum())
    assert fetches == {False: 16, True: 9}
