"""A softmax over rows, with its gradient, and a hard sigmoid."""

import jax.numpy as jnp

from tpukern import Block, Dim, In, Out, Ref, kernel


def softmax_reference(x):
    import torch

    return torch.softmax(x, -1)


@kernel(op="soft_kernels::softmax", reference=softmax_reference, tolerance=8)
def softmax(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 32, 128, default=32)) -> None:
    z = x[...].astype("float32")
    e = jnp.exp(z - jnp.max(z, axis=-1, keepdims=True))
    y[...] = (e / jnp.sum(e, axis=-1, keepdims=True)).astype(y.dtype)


@softmax.backward
@kernel
def softmax_backward(
    y: Ref = In("*r d"), dy: Ref = In("*r d"), dx: Ref = Out("*r d"), *, r: Dim = Block(8, 32, 128, default=32)
) -> None:
    p, g = y[...].astype("float32"), dy[...].astype("float32")
    dx[...] = (p * (g - jnp.sum(p * g, axis=-1, keepdims=True))).astype(dx.dtype)


def hardsigmoid_reference(x):
    import torch

    return torch.nn.functional.hardsigmoid(x)


@kernel(op="soft_kernels::hardsigmoid", reference=hardsigmoid_reference, tolerance=4)
def hardsigmoid(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 64, 256, default=64)) -> None:
    y[...] = (jnp.clip(x[...].astype("float32") + 3, 0, 6) / 6).astype(y.dtype)
