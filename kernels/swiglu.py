"""SwiGLU: the gated product between the two halves of a Llama-style feed-forward block.

    y = silu(gate) * up,  silu(z) = z * sigmoid(z)

Shapes: gate, up, y (*m, f). float32 or bfloat16; computed in float32 and rounded once (ATen's two bfloat16 ops round silu
too, so the last bit may differ). No limits on sizes. ATen has no such op: model code calls ``tpukern::swiglu``.

Source: Shazeer, GLU Variants Improve Transformer, 2020.
"""

from typing import TYPE_CHECKING

import jax

from tpukern.dsl import F32, Block, Dim, In, Out, Ref, Workload, kernel

if TYPE_CHECKING:
    from torch import Tensor


LLAMA = "meta-llama/Meta-Llama-3-8B config: intermediate_size 14336"
QWEN_MOE = "Qwen/Qwen3-30B-A3B config: moe_intermediate_size 768; 8192 tokens to 8 of 128 experts each"


def reference(gate: "Tensor", up: "Tensor") -> "Tensor":
    import torch

    return torch.nn.functional.silu(gate) * up


@kernel(
    op="tpukern::swiglu",
    reference=reference,
    workloads=(
        Workload("llama3_8b_prefill", m=8192, f=14336, source=LLAMA),
        Workload("llama3_8b_train_f32", dtype="float32", m=4096, f=14336, source=LLAMA),
        Workload("qwen3_8b_prefill", m=8192, f=12288, source="Qwen/Qwen3-8B config: intermediate_size 12288"),
        Workload("qwen3_30b_a3b_expert", m=512, f=768, source=QWEN_MOE),
    ),
    tolerance={"float32": 20, "bfloat16": 1},
)
def swiglu(
    gate: Ref = In("*m f"),
    up: Ref = In("*m f"),
    y: Ref = Out("*m f"),
    *,
    m: Dim = Block(8, 32, 128, 256, 512, 1024, default=256),
    f: Dim = Block(128, 512, 1024, 2048, 4096, default=1024),
) -> None:
    z = gate[...].astype(F32)
    y[...] = (z * jax.nn.sigmoid(z) * up[...].astype(F32)).astype(y.dtype)


@swiglu.backward
@kernel(op="tpukern::swiglu_backward")
def swiglu_backward(
    gate: Ref = In("*m f"),
    up: Ref = In("*m f"),
    dy: Ref = In("*m f"),
    dgate: Ref = Out("*m f"),
    dup: Ref = Out("*m f"),
    *,
    m: Dim = Block(8, 32, 128, 256, 512, default=256),
    f: Dim = Block(128, 512, 1024, 2048, default=1024),
) -> None:
    z, d = gate[...].astype(F32), dy[...].astype(F32)
    s = jax.nn.sigmoid(z)
    dup[...] = (d * z * s).astype(dup.dtype)
    dgate[...] = (d * up[...].astype(F32) * s * (1.0 + z * (1.0 - s))).astype(dgate.dtype)
