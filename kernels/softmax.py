"""Softmax over the last axis, and its logarithm, in Helion.

    softmax:     y = exp(x - max(x)) / sum(exp(x - max(x)))
    log_softmax: y = x - max(x) - log(sum(exp(x - max(x))))

Shapes: x, y (*r, d). float32 or bfloat16; computed in float32 and rounded once. Limits: a row lies whole in VMEM, eight of
them a block at least (d up to about 300,000). Opt-in overrides: XLA fuses a softmax with its neighbours, a kernel does not.
"""

from typing import TYPE_CHECKING

from tpukern.dsl import Override, Workload, kernel

if TYPE_CHECKING:
    import helion.language as hl
    import torch

ROUTER = "Qwen/Qwen3-30B-A3B config: 128 experts, 8192 tokens"
VOCABULARY = "meta-llama/Meta-Llama-3-8B config: vocab_size 128256"


def softmax_reference(x: "torch.Tensor") -> "torch.Tensor":
    import torch

    return torch.softmax(x, -1)


def log_softmax_reference(x: "torch.Tensor") -> "torch.Tensor":
    import torch

    return torch.log_softmax(x, -1)


def unsupported(x: "torch.Tensor", dim: int) -> str | None:
    """Why ATen's own kernel has to serve this call, or None."""
    if x.dim() == 0 or dim % x.dim() != x.dim() - 1:
        return f"dim {dim} is not the last of {x.dim()}"
    if x.numel() == 0:
        return "the input is empty"
    if str(x.dtype) not in ("torch.float32", "torch.bfloat16"):
        return f"the input is {x.dtype}, the kernel has float32 and bfloat16"
    return None


def forward_cond(x: "torch.Tensor", dim: int, half_to_float: bool) -> str | None:
    return "half_to_float is set" if half_to_float else unsupported(x, dim)


def backward_cond(dy: "torch.Tensor", y: "torch.Tensor", dim: int, input_dtype: "torch.dtype") -> str | None:
    return f"the gradient is {dy.dtype}, the input {input_dtype}" if dy.dtype != input_dtype else unsupported(y, dim)


def softmax_impl(x: "torch.Tensor", dim: int, half_to_float: bool) -> "torch.Tensor":
    y: torch.Tensor = softmax.launch(x)
    return y


def softmax_backward_impl(dy: "torch.Tensor", y: "torch.Tensor", dim: int, input_dtype: "torch.dtype") -> "torch.Tensor":
    dx: torch.Tensor = softmax_backward.launch(y, dy)
    return dx


def log_softmax_impl(x: "torch.Tensor", dim: int, half_to_float: bool) -> "torch.Tensor":
    y: torch.Tensor = log_softmax.launch(x)
    return y


def log_softmax_backward_impl(dy: "torch.Tensor", y: "torch.Tensor", dim: int, input_dtype: "torch.dtype") -> "torch.Tensor":
    dx: torch.Tensor = log_softmax_backward.launch(y, dy)
    return dx


@kernel(
    op="tpukern::softmax",
    frontend="helion",
    signature="x: *r d -> y: *r d",
    reference=softmax_reference,
    overrides=(
        Override(
            "aten::_softmax",
            impl=softmax_impl,
            cond=forward_cond,
            opt_in=True,
            flips_with=("aten::_softmax_backward_data",),
        ),
        Override(
            "aten::_softmax_backward_data",
            impl=softmax_backward_impl,
            cond=backward_cond,
            opt_in=True,
            flips_with=("aten::_softmax",),
        ),
    ),
    workloads=(
        Workload("qwen3_30b_a3b_router", dtype="float32", r=8192, d=128, source=ROUTER),
        Workload("attention_scores_4k", r=32 * 512, d=4096, source="32 heads x 512 queries over 4096 keys"),
    ),
    tolerance={"float32": 8, "bfloat16": 2},
)
def softmax(x: "torch.Tensor") -> "torch.Tensor":
    r, _ = x.size()
    y = torch.empty_like(x)
    for tile_r in hl.tile(r):
        v = x[tile_r, :].to(torch.float32)
        e = torch.exp(v - torch.amax(v, dim=1)[:, None])
        y[tile_r, :] = (e / torch.sum(e, dim=1)[:, None]).to(x.dtype)
    return y


@softmax.backward
@kernel(op="tpukern::softmax_backward", frontend="helion", signature="y: *r d, dy: *r d -> dx: *r d")
def softmax_backward(y: "torch.Tensor", dy: "torch.Tensor") -> "torch.Tensor":
    r, _ = y.size()
    dx = torch.empty_like(y)
    for tile_r in hl.tile(r):
        p = y[tile_r, :].to(torch.float32)
        g = dy[tile_r, :].to(torch.float32)
        dx[tile_r, :] = (p * (g - torch.sum(p * g, dim=1)[:, None])).to(y.dtype)
    return dx


@kernel(
    op="tpukern::log_softmax",
    frontend="helion",
    signature="x: *r d -> y: *r d",
    reference=log_softmax_reference,
    overrides=(
        Override(
            "aten::_log_softmax",
            impl=log_softmax_impl,
            cond=forward_cond,
            opt_in=True,
            flips_with=("aten::_log_softmax_backward_data",),
        ),
        Override(
            "aten::_log_softmax_backward_data",
            impl=log_softmax_backward_impl,
            cond=backward_cond,
            opt_in=True,
            flips_with=("aten::_log_softmax",),
        ),
    ),
    workloads=(
        Workload("llama2_7b_logits", dtype="float32", r=4096, d=32000, source="meta-llama/Llama-2-7b config: vocab_size 32000"),
        Workload("qwen3_30b_a3b_router", dtype="float32", r=8192, d=128, source=ROUTER),
    ),
    tolerance={"float32": 8, "bfloat16": 5},
)
def log_softmax(x: "torch.Tensor") -> "torch.Tensor":
    r, _ = x.size()
    y = torch.empty_like(x)
    for tile_r in hl.tile(r):
        v = x[tile_r, :].to(torch.float32)
        shifted = v - torch.amax(v, dim=1)[:, None]
        y[tile_r, :] = (shifted - torch.log(torch.sum(torch.exp(shifted), dim=1))[:, None]).to(x.dtype)
    return y


@log_softmax.backward
@kernel(op="tpukern::log_softmax_backward", frontend="helion", signature="y: *r d, dy: *r d -> dx: *r d")
def log_softmax_backward(y: "torch.Tensor", dy: "torch.Tensor") -> "torch.Tensor":
    r, _ = y.size()
    dx = torch.empty_like(y)
    for tile_r in hl.tile(r):
        g = dy[tile_r, :].to(torch.float32)
        p = torch.exp(y[tile_r, :].to(torch.float32))
        dx[tile_r, :] = (g - p * torch.sum(g, dim=1)[:, None]).to(y.dtype)
    return dx
