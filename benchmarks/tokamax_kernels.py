"""Tokamax's TPU kernels, adopted. Tokamax is no dependency: `pip install tokamax` (0.0.12 with jax 0.10) beside tpukern.

tpukern compile benchmarks/tokamax_kernels.py:tokamax_attention --target v6e
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import jax
import tokamax
from jax.extend import backend
from peer_kernels import BF16, LLAMA, MIXTRAL, group_sizes, grouped_reference

import tpukern
from tpukern import Workload


@dataclasses.dataclass(frozen=True)
class Chip:
    """What Tokamax asks of a device."""

    device_kind: str
    platform: str = "tpu"


@contextlib.contextmanager
def on_the_chip() -> Iterator[None]:
    """Answers Tokamax, which asks JAX for its default device, with the chip that is traced for."""
    traced_for = jax.sharding.get_abstract_mesh().abstract_device
    with mock.patch.object(backend, "get_default_device", return_value=Chip(device_kind=traced_for.device_kind)):
        yield


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool = True) -> jax.Array:
    with on_the_chip():
        return tokamax.dot_product_attention(q, k, v, is_causal=is_causal, implementation="mosaic")


def _ragged_dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    with on_the_chip():
        return tokamax.ragged_dot(lhs, rhs, group_sizes, implementation="mosaic")


def _cross_entropy(x: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    with on_the_chip():
        return tokamax.linear_softmax_cross_entropy_loss(x, labels, weights, implementation="mosaic_tpu")


FORWARD = ("forward",)

tokamax_attention = tpukern.adopt(
    _attention,
    name="tokamax_attention",
    signature="q: b i (hk g) d, k: b j hk d, v: b j hk d -> o: b i (hk g) d",
    dtypes=BF16,
    backward=False,
    workloads=(Workload("llama3_8b_4k", b=1, i=4096, j=4096, hk=8, g=4, d=128, directions=FORWARD, source=LLAMA),),
)
tokamax_ragged_dot = tpukern.adopt(
    _ragged_dot,
    name="tokamax_ragged_dot",
    signature="lhs: m k, rhs: e k n, group_sizes: e int32 table -> out: m n",
    reference=grouped_reference,
    dtypes=BF16,
    backward=False,
    each=("e",),
    draw={"group_sizes": group_sizes},
    workloads=(Workload("mixtral_up_4k", m=4096, k=4096, n=1792, e=8, directions=FORWARD, source=MIXTRAL),),
)
tokamax_cross_entropy = tpukern.adopt(
    _cross_entropy,
    name="tokamax_cross_entropy",
    signature="x: b h, labels: b int32, weights: h v -> loss: float32",
    dtypes=BF16,
    backward=False,
    workloads=(Workload("llama3_8b_head_4k", b=4096, h=4096, v=128256, directions=FORWARD, source=LLAMA),),
)
