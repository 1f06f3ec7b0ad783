"""RMSNorm: each row divided by its root mean square, then scaled by a weight.

    y = x * rstd * w,  rstd = 1 / sqrt(mean(x^2) + eps)        over the last axis

Shapes: x, y (*r, d); w (d,); rstd (*r, 1). float32 or bfloat16; all arithmetic in float32, rounded once at the end.
Limits: a row lies whole in VMEM, so 8 rows of x, y and their float32 copies have to fit (d up to about 100,000).

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019. The backward is its derivative:
dx = rstd * (g - n * mean(g * n)) and dw = sum over rows of dy * n, with n = x * rstd and g = dy * w.
"""

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from tpukern.dsl import F32, Block, Dim, In, Out, Override, Ref, Workload, kernel

if TYPE_CHECKING:
    from torch import Tensor

LLAMA = "meta-llama/Meta-Llama-3-8B config: hidden_size 4096, max_position_embeddings 8192"
FUSED = "aten::_fused_rms_norm"
FUSED_BACKWARD = f"{FUSED}_backward"
FLOAT32_EPS = 2.0**-23  # what ATen takes when eps is None, whatever the input's dtype


def reference(x: "Tensor", w: "Tensor", *, eps: float) -> "Tensor":
    """ATen's RMSNorm over the last axis."""
    import torch

    return torch.nn.functional.rms_norm(x, (x.shape[-1],), w, eps)


def unsupported(x: "Tensor", normalized_shape: list[int], w: "Tensor | None") -> str | None:
    """Why ATen's own kernel has to serve this call, or None."""
    if x.numel() == 0:
        return "the input is empty"
    if str(x.dtype) not in ("torch.float32", "torch.bfloat16"):
        return f"the input is {x.dtype}, the kernel has float32 and bfloat16"
    if list(x.shape[x.dim() - len(normalized_shape) :]) != list(normalized_shape) or not normalized_shape:
        return f"normalized_shape {list(normalized_shape)} is not the end of the input's shape {list(x.shape)}"
    if w is not None and w.dtype != x.dtype:
        return f"the weight is {w.dtype}, the input {x.dtype}"
    if w is not None and list(w.shape) != list(normalized_shape):
        return f"the weight's shape {list(w.shape)} is not normalized_shape {list(normalized_shape)}"
    return None


def rows(x: "Tensor", normalized_shape: list[int]) -> "Tensor":
    """`x` with the normalised axes as one; no call into ATen in the usual case of one."""
    return x if len(normalized_shape) == 1 else x.flatten(-len(normalized_shape))


def weight_or_ones(x: "Tensor", normalized_shape: list[int], w: "Tensor | None") -> "Tensor":
    return rows(w, normalized_shape) if w is not None else x.new_ones(math.prod(normalized_shape))


def forward_cond(x: "Tensor", normalized_shape: list[int], w: "Tensor | None", eps: float | None) -> str | None:
    return unsupported(x, normalized_shape, w)


def forward_impl(x: "Tensor", normalized_shape: list[int], w: "Tensor | None", eps: float | None) -> tuple["Tensor", "Tensor"]:
    flat = rows(x, normalized_shape)
    y, rstd = rms_norm.launch(flat, weight_or_ones(x, normalized_shape, w), eps=FLOAT32_EPS if eps is None else eps)
    if len(normalized_shape) == 1:
        return y, rstd
    return y.view(x.shape), rstd.view(x.shape[: x.dim() - len(normalized_shape)] + (1,) * len(normalized_shape))


def backward_cond(
    dy: "Tensor",
    x: "Tensor",
    normalized_shape: list[int],
    rstd: "Tensor",
    w: "Tensor | None",
    output_mask: list[bool],
) -> str | None:
    return unsupported(x, normalized_shape, w)


def backward_impl(
    dy: "Tensor",
    x: "Tensor",
    normalized_shape: list[int],
    rstd: "Tensor",
    w: "Tensor | None",
    output_mask: list[bool],
) -> tuple["Tensor | None", "Tensor | None"]:
    one = len(normalized_shape) == 1
    flat = rows(x, normalized_shape)
    statistics = rstd if one else rstd.view(*flat.shape[:-1], 1)
    dx, dw = rms_norm_backward.launch(flat, weight_or_ones(x, normalized_shape, w), statistics, rows(dy, normalized_shape))
    if not one:
        dx, dw = dx.view(x.shape), dw.view(normalized_shape)
    return dx if output_mask[0] else None, dw if output_mask[1] and w is not None else None


def whole_cond(x: "Tensor", normalized_shape: list[int], w: "Tensor | None" = None, eps: float | None = None) -> str | None:
    return unsupported(x, normalized_shape, w)


def whole_impl(x: "Tensor", normalized_shape: list[int], w: "Tensor | None" = None, eps: float | None = None) -> "Tensor":
    import torch

    return torch.ops.aten._fused_rms_norm(x, normalized_shape, w, eps)[0]


@kernel(
    op="tpukern::rms_norm",
    reference=reference,
    overrides=(
        Override(FUSED, impl=forward_impl, cond=forward_cond, flips_with=(FUSED_BACKWARD,)),
        Override(FUSED_BACKWARD, impl=backward_impl, cond=backward_cond, flips_with=(FUSED,)),
        Override("aten::rms_norm", impl=whole_impl, cond=whole_cond, keys=("PrivateUse1", "AutogradPrivateUse1")),
    ),
    workloads=(
        Workload("llama3_8b_prefill", r=8192, d=4096, eps=1e-5, source=LLAMA),
        Workload("llama3_8b_train", r=4 * 8192, d=4096, eps=1e-5, source=LLAMA),
        Workload("llama3_8b_train_f32", dtype="float32", r=4096, d=4096, eps=1e-5, source=LLAMA),
        Workload("qwen3_8b_query_norm", r=4096 * 32, d=128, source="Qwen/Qwen3-8B config: 32 heads, head_dim 128"),
        Workload("qwen3_30b_a3b_prefill", r=8192, d=2048, source="Qwen/Qwen3-30B-A3B config: hidden_size 2048"),
    ),
    tolerance={"float32": 1.2, "bfloat16": 1},
)
def rms_norm(
    x: Ref = In("*r d"),
    w: Ref = In("_ d"),
    y: Ref = Out("*r d"),
    rstd: Ref = Out("*r 1", "float32", saved=True),
    *,
    eps: float = 1e-6,
    r: Dim = Block(8, 16, 32, 64, 128, 256, 512, 1024, default=256),
) -> None:
    v = x[...].astype(F32)
    rstd[...] = jax.lax.rsqrt(jnp.mean(v * v, axis=-1, keepdims=True) + eps)
    y[...] = (v * rstd[...] * w[...].astype(F32)).astype(y.dtype)


@rms_norm.backward
@kernel(op="tpukern::rms_norm_backward")
def rms_norm_backward(
    x: Ref = In("*r d"),
    w: Ref = In("_ d"),
    rstd: Ref = In("*r 1", "float32"),
    dy: Ref = In("*r d"),
    dx: Ref = Out("*r d"),
    dw: Ref = Out("_ d", "float32", init=0.0),  # summed in float32, returned in the weight's type
    *,
    r: Dim = Block(8, 16, 32, 64, 128, 256, 512, default=64),
) -> None:
    n = x[...].astype(F32) * rstd[...]
    g = dy[...].astype(F32)
    gw = g * w[...].astype(F32)
    dx[...] = (rstd[...] * (gw - n * jnp.mean(gw * n, axis=-1, keepdims=True))).astype(dx.dtype)
    dw[...] += jnp.sum(g * n, axis=0, keepdims=True)
