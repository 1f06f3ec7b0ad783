"""A residual added and normalised in one pass, in Helion: what a Llama-style block does between its halves.

    s = x + residual,  y = s * rstd * w,  rstd = 1 / sqrt(mean(s^2) + eps)        over the last axis

Shapes: x, residual, y, s (*r, d); w (d,). float32 or bfloat16; all arithmetic in float32, y from the sum before it is rounded.
Limits: a row lies whole in VMEM. ATen has no such op: model code calls `tpukern::add_rms_norm`.
"""

from typing import TYPE_CHECKING

from tpukern.dsl import Workload, kernel

if TYPE_CHECKING:
    import helion.language as hl
    import torch

LLAMA = "meta-llama/Meta-Llama-3-8B config: hidden_size 4096, max_position_embeddings 8192"


def reference(
    x: "torch.Tensor", residual: "torch.Tensor", w: "torch.Tensor", *, eps: float
) -> tuple["torch.Tensor", "torch.Tensor"]:
    import torch

    total = x + residual
    return torch.nn.functional.rms_norm(total, (x.shape[-1],), w, eps), total


@kernel(
    op="tpukern::add_rms_norm",
    frontend="helion",
    signature="x: *r d, residual: *r d, w: d -> y: *r d, s: *r d, rstd: *r 1 float32 saved",
    reference=reference,
    workloads=(Workload("llama3_8b", r=8192, d=4096, eps=1e-5, source=LLAMA),),
    tolerance={"float32": 1, "bfloat16": 2},
)
def add_rms_norm(
    x: "torch.Tensor", residual: "torch.Tensor", w: "torch.Tensor", eps: float = 1e-6
) -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]:
    r, d = x.size()
    y = torch.empty_like(x)
    s = torch.empty_like(x)
    rstd = torch.empty([r, 1], dtype=torch.float32, device=x.device)
    for tile_r in hl.tile(r):
        v = x[tile_r, :].to(torch.float32) + residual[tile_r, :].to(torch.float32)
        scale = torch.rsqrt(torch.sum(v * v, dim=1)[:, None] / d + eps)
        y[tile_r, :] = (v * scale * w[:].to(torch.float32)).to(x.dtype)
        s[tile_r, :] = v.to(x.dtype)
        rstd[tile_r, :] = scale
    return y, s, rstd


@add_rms_norm.backward
@kernel(
    op="tpukern::add_rms_norm_backward",
    frontend="helion",
    signature="s: *r d, w: d, rstd: *r 1 float32, dy: *r d, ds: *r d -> dx: *r d, dresidual: *r d, dw: d",
)
def add_rms_norm_backward(
    s: "torch.Tensor", w: "torch.Tensor", rstd: "torch.Tensor", dy: "torch.Tensor", ds: "torch.Tensor"
) -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]:
    r, d = s.size()
    dx = torch.empty_like(s)
    dw = torch.zeros([d], dtype=torch.float32, device=s.device)
    for tile_r in hl.tile(r):
        n = s[tile_r, :].to(torch.float32) * rstd[tile_r, :]
        g = dy[tile_r, :].to(torch.float32)
        gw = g * w[:].to(torch.float32)
        along = torch.sum(gw * n, dim=1)[:, None] / d
        dx[tile_r, :] = (rstd[tile_r, :] * (gw - n * along) + ds[tile_r, :].to(torch.float32)).to(s.dtype)
        hl.atomic_add(dw, [slice(None)], torch.sum(g * n, dim=0))
    return dx, dx, dw
