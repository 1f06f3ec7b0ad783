"""Sums, means and sums of squares over the last axis, in Helion.

    row_sum: y = sum(x)       row_mean: y = sum(x) / d       over the last axis

Shapes: x (*r, d); y (*r, 1). float32 or bfloat16, added in float32 and rounded once. Limits: a row lies whole in VMEM.
"""

from typing import TYPE_CHECKING

from tpukern.dsl import Workload, kernel

if TYPE_CHECKING:
    import helion.language as hl
    import torch

LLAMA = "meta-llama/Meta-Llama-3-8B config: hidden_size 4096, max_position_embeddings 8192"


def sum_reference(x: "torch.Tensor") -> "torch.Tensor":
    return x.sum(-1, keepdim=True)


def mean_reference(x: "torch.Tensor") -> "torch.Tensor":
    return x.mean(-1, keepdim=True)


@kernel(
    op="tpukern::row_sum",
    frontend="helion",
    signature="x: *r d -> y: *r 1",
    reference=sum_reference,
    workloads=(Workload("llama3_8b", r=8192, d=4096, source=LLAMA),),
    tolerance={"float32": 2, "bfloat16": 2},
)
def row_sum(x: "torch.Tensor") -> "torch.Tensor":
    r, _ = x.size()
    y = torch.empty([r, 1], dtype=x.dtype, device=x.device)
    for tile_r in hl.tile(r):
        y[tile_r, :] = torch.sum(x[tile_r, :].to(torch.float32), dim=1)[:, None].to(x.dtype)
    return y


@row_sum.backward
@kernel(op="tpukern::row_sum_backward", frontend="helion", signature="x: *r d, dy: *r 1 -> dx: *r d")
def row_sum_backward(x: "torch.Tensor", dy: "torch.Tensor") -> "torch.Tensor":
    r, d = x.size()
    dx = torch.empty_like(x)
    for tile_r in hl.tile(r):
        dx[tile_r, :] = dy[tile_r, :] + hl.zeros([tile_r, d], dtype=x.dtype)
    return dx


@kernel(
    op="tpukern::row_mean",
    frontend="helion",
    signature="x: *r d -> y: *r 1",
    reference=mean_reference,
    workloads=(Workload("llama3_8b", r=8192, d=4096, source=LLAMA),),
    tolerance={"float32": 2, "bfloat16": 2},
)
def row_mean(x: "torch.Tensor") -> "torch.Tensor":
    r, d = x.size()
    y = torch.empty([r, 1], dtype=x.dtype, device=x.device)
    for tile_r in hl.tile(r):
        y[tile_r, :] = (torch.sum(x[tile_r, :].to(torch.float32), dim=1)[:, None] / d).to(x.dtype)
    return y


@row_mean.backward
@kernel(op="tpukern::row_mean_backward", frontend="helion", signature="x: *r d, dy: *r 1 -> dx: *r d")
def row_mean_backward(x: "torch.Tensor", dy: "torch.Tensor") -> "torch.Tensor":
    r, d = x.size()
    dx = torch.empty_like(x)
    for tile_r in hl.tile(r):
        g = dy[tile_r, :].to(torch.float32) / d
        dx[tile_r, :] = (g + hl.zeros([tile_r, d], dtype=torch.float32)).to(x.dtype)
    return dx
