"""Cross entropy of logits with one right class each, in Helion: no row of probabilities is ever stored.

    loss = lse - x[labels],  lse = max(x) + log(sum(exp(x - max(x))))        over the last axis

Shapes: x (r, v); labels (r,) int32; loss, lse (r,) float32. float32 or bfloat16 logits; all arithmetic in float32. A label that
is no class (ATen's ignore_index, -100) gives a loss of lse: mask it outside. Limits: a row lies whole in VMEM.
"""

from typing import TYPE_CHECKING

from tpukern.dsl import Workload, kernel

if TYPE_CHECKING:
    import helion.language as hl
    import torch


def reference(x: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
    import torch

    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    return torch.nn.functional.cross_entropy(wide, labels.long(), reduction="none")


@kernel(
    op="tpukern::cross_entropy",
    frontend="helion",
    signature="x: r v, labels: r int32 -> loss: r float32, lse: r float32 saved",
    reference=reference,
    config={"block_sizes": [8]},
    workloads=(
        Workload("gpt2_f32", dtype="float32", r=8 * 1024, v=50257, source="openai-community/gpt2 config: vocab_size 50257"),
        Workload("llama2_7b", r=4096, v=32000, source="meta-llama/Llama-2-7b config: vocab_size 32000"),
    ),
    tolerance={"float32": 12, "bfloat16": 1},
)
def cross_entropy(x: "torch.Tensor", labels: "torch.Tensor") -> tuple["torch.Tensor", "torch.Tensor"]:
    r, v = x.size()
    column = labels.view([r, 1])  # a vector's least block is 128, a column's 8
    loss = torch.empty([r, 1], dtype=torch.float32, device=x.device)
    lse = torch.empty([r, 1], dtype=torch.float32, device=x.device)
    for tile_r in hl.tile(r):
        row = x[tile_r, :].to(torch.float32)
        top = torch.amax(row, dim=1)[:, None]
        total = top + torch.log(torch.sum(torch.exp(row - top), dim=1)[:, None])
        right = hl.arange(v)[None, :] == column[tile_r, :]
        loss[tile_r, :] = total - torch.sum(torch.where(right, row, 0.0), dim=1)[:, None]
        lse[tile_r, :] = total
    return loss.view([r]), lse.view([r])


@cross_entropy.backward
@kernel(
    op="tpukern::cross_entropy_backward",
    frontend="helion",
    signature="x: r v, labels: r int32, lse: r float32, dloss: r float32 -> dx: r v",
    config={"block_sizes": [8]},
)
def cross_entropy_backward(
    x: "torch.Tensor", labels: "torch.Tensor", lse: "torch.Tensor", dloss: "torch.Tensor"
) -> "torch.Tensor":
    r, v = x.size()
    column, total, g = labels.view([r, 1]), lse.view([r, 1]), dloss.view([r, 1])
    dx = torch.empty_like(x)
    for tile_r in hl.tile(r):
        p = torch.exp(x[tile_r, :].to(torch.float32) - total[tile_r, :])
        right = hl.arange(v)[None, :] == column[tile_r, :]
        dx[tile_r, :] = ((p - torch.where(right, 1.0, 0.0)) * g[tile_r, :]).to(x.dtype)
    return dx
