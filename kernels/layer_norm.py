"""LayerNorm over the last axis, in Helion: each row less its mean, divided by its standard deviation, scaled and shifted.

    y = (x - mean) * rstd * w + b,  rstd = 1 / sqrt(mean((x - mean)^2) + eps)

Shapes: x, y (*r, d); w, b (d,); mean, rstd (*r, 1). float32 or bfloat16; all arithmetic in float32, rounded once at the end.
Limits: a row lies whole in VMEM. The gradients of w and b are summed in float32, block after block, in one result.

Source: Ba, Kiros and Hinton, Layer Normalization, 2016; the backward is its derivative.
"""

from typing import TYPE_CHECKING

from tpukern.dsl import Override, Workload, kernel

if TYPE_CHECKING:
    import helion.language as hl
    import torch

FORWARD, BACKWARD = "aten::native_layer_norm", "aten::native_layer_norm_backward"
Results = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]


def reference(x: "torch.Tensor", w: "torch.Tensor", b: "torch.Tensor", *, eps: float) -> "torch.Tensor":
    """ATen's LayerNorm over the last axis."""
    import torch

    return torch.nn.functional.layer_norm(x, (x.shape[-1],), w, b, eps)


def unsupported(
    x: "torch.Tensor", normalized_shape: list[int], w: "torch.Tensor | None", b: "torch.Tensor | None"
) -> str | None:
    """Why ATen's own kernel has to serve this call, or None."""
    if x.numel() == 0:
        return "the input is empty"
    if str(x.dtype) not in ("torch.float32", "torch.bfloat16"):
        return f"the input is {x.dtype}, the kernel has float32 and bfloat16"
    if list(normalized_shape) != [x.shape[-1]]:
        return f"normalized_shape {list(normalized_shape)} is not the last axis of {list(x.shape)}"
    if w is None or b is None:
        return "the weight or the bias is missing"
    if w.dtype != x.dtype or b.dtype != x.dtype:
        return f"the weight is {w.dtype}, the bias {b.dtype}, the input {x.dtype}"
    return None


def forward_cond(
    x: "torch.Tensor", normalized_shape: list[int], w: "torch.Tensor | None", b: "torch.Tensor | None", eps: float
) -> str | None:
    return unsupported(x, normalized_shape, w, b)


def forward_impl(
    x: "torch.Tensor", normalized_shape: list[int], w: "torch.Tensor | None", b: "torch.Tensor | None", eps: float
) -> tuple["torch.Tensor", ...]:
    results: tuple[torch.Tensor, ...] = layer_norm.launch(x, w, b, eps=eps)
    return results


def backward_cond(
    dy: "torch.Tensor",
    x: "torch.Tensor",
    normalized_shape: list[int],
    mean: "torch.Tensor",
    rstd: "torch.Tensor",
    w: "torch.Tensor | None",
    b: "torch.Tensor | None",
    output_mask: list[bool],
) -> str | None:
    return unsupported(x, normalized_shape, w, b)


def backward_impl(
    dy: "torch.Tensor",
    x: "torch.Tensor",
    normalized_shape: list[int],
    mean: "torch.Tensor",
    rstd: "torch.Tensor",
    w: "torch.Tensor | None",
    b: "torch.Tensor | None",
    output_mask: list[bool],
) -> Results:
    dx, dw, db = layer_norm_backward.launch(x, w, mean, rstd, dy)
    return dx if output_mask[0] else None, dw if output_mask[1] else None, db if output_mask[2] else None


@kernel(
    op="tpukern::layer_norm",
    frontend="helion",
    signature="x: *r d, w: d, b: d -> y: *r d, mean: *r 1 float32 saved, rstd: *r 1 float32 saved",
    reference=reference,
    overrides=(
        Override(FORWARD, impl=forward_impl, cond=forward_cond, opt_in=True, flips_with=(BACKWARD,)),
        Override(BACKWARD, impl=backward_impl, cond=backward_cond, opt_in=True, flips_with=(FORWARD,)),
    ),
    workloads=(
        Workload("gpt2_xl", r=8 * 1024, d=1600, source="openai-community/gpt2-xl config: n_embd 1600, n_positions 1024"),
        Workload("vit_l_16", dtype="float32", r=32 * 197, d=1024, eps=1e-6, source="google/vit-large-patch16-224: hidden 1024"),
    ),
    tolerance={"float32": 1, "bfloat16": 1},
)
def layer_norm(
    x: "torch.Tensor", w: "torch.Tensor", b: "torch.Tensor", eps: float = 1e-5
) -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]:
    r, d = x.size()
    y = torch.empty_like(x)
    mean = torch.empty([r, 1], dtype=torch.float32, device=x.device)
    rstd = torch.empty([r, 1], dtype=torch.float32, device=x.device)
    for tile_r in hl.tile(r):
        v = x[tile_r, :].to(torch.float32)
        average = torch.sum(v, dim=1)[:, None] / d
        centred = v - average
        scale = torch.rsqrt(torch.sum(centred * centred, dim=1)[:, None] / d + eps)
        y[tile_r, :] = (centred * scale * w[:].to(torch.float32) + b[:].to(torch.float32)).to(x.dtype)
        mean[tile_r, :] = average
        rstd[tile_r, :] = scale
    return y, mean, rstd


@layer_norm.backward
@kernel(
    op="tpukern::layer_norm_backward",
    frontend="helion",
    signature="x: *r d, w: d, mean: *r 1 float32, rstd: *r 1 float32, dy: *r d -> dx: *r d, dw: d, db: d",
)
def layer_norm_backward(
    x: "torch.Tensor", w: "torch.Tensor", mean: "torch.Tensor", rstd: "torch.Tensor", dy: "torch.Tensor"
) -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]:
    r, d = x.size()
    dx = torch.empty_like(x)
    dw = torch.zeros([d], dtype=torch.float32, device=x.device)
    db = torch.zeros([d], dtype=torch.float32, device=x.device)
    for tile_r in hl.tile(r):
        n = (x[tile_r, :].to(torch.float32) - mean[tile_r, :]) * rstd[tile_r, :]
        g = dy[tile_r, :].to(torch.float32)
        gw = g * w[:].to(torch.float32)
        along = torch.sum(gw * n, dim=1)[:, None] / d
        dx[tile_r, :] = (rstd[tile_r, :] * (gw - torch.sum(gw, dim=1)[:, None] / d - n * along)).to(x.dtype)
        hl.atomic_add(dw, [slice(None)], torch.sum(g * n, dim=0))
        hl.atomic_add(db, [slice(None)], torch.sum(g, dim=0))
    return dx, dw, db
