"""The model of tiny_llama.py with a TPU kernel of its own: SwiGLU, forward and backward, written below."""

import jax
import tiny_llama

from tpukern import Block, Dim, In, Out, Ref, kernel


@kernel(op="tiny_llama::swiglu", reference=tiny_llama.silu_times)
def swiglu(
    gate: Ref = In("*m f"), up: Ref = In("*m f"), y: Ref = Out("*m f"),
    *, m: Dim = Block(256, 512, 1024), f: Dim = Block(128, 512, 1024, default=512),
) -> None:  # fmt: skip
    z = gate[...].astype("float32")
    y[...] = (z * jax.nn.sigmoid(z) * up[...]).astype(y.dtype)


@swiglu.backward
@kernel
def swiglu_backward(
    gate: Ref = In("*m f"), up: Ref = In("*m f"), dy: Ref = In("*m f"), dgate: Ref = Out("*m f"), dup: Ref = Out("*m f"),
    *, m: Dim = Block(256, 512, 1024), f: Dim = Block(128, 512, 1024, default=512),
) -> None:  # fmt: skip
    z, s = gate[...].astype("float32"), jax.nn.sigmoid(gate[...].astype("float32"))
    dup[...] = (dy[...] * z * s).astype(dup.dtype)
    dgate[...] = (dy[...] * up[...] * s * (1 + z * (1 - s))).astype(dgate.dtype)


if __name__ == "__main__":
    tiny_llama.main(activation=swiglu)
