"""Rotary position embedding, in Helion: each pair (x[i], x[i + d/2]) of a head turned by an angle of its position.

    y = x * cos + rotate_half(x) * sin,  rotate_half(x) = (-x[d/2:], x[:d/2])

Shapes: x, y (b, s, h, d) as (b, s, h, 2, d/2): the halves are an axis of their own, which costs nothing; cos, sin (s, 1, d/2).
float32 or bfloat16; computed in float32 and rounded once. The backward turns the other way.

Source: Su et al., RoFormer, 2021; the half-rotated form of GPT-NeoX and Llama.
"""

from typing import TYPE_CHECKING

from tpukern.dsl import Workload, kernel

if TYPE_CHECKING:
    import helion.language as hl
    import torch

LLAMA = "meta-llama/Meta-Llama-3-8B config: 32 heads of 128, max_position_embeddings 8192"


def reference(x: "torch.Tensor", cos: "torch.Tensor", sin: "torch.Tensor") -> "torch.Tensor":
    import torch

    c, s = cos[None], sin[None]
    first, second = x[:, :, :, 0], x[:, :, :, 1]
    return torch.stack([first * c - second * s, second * c + first * s], 3)


@kernel(
    op="tpukern::rotary",
    frontend="helion",
    signature="x: b s h 2 d, cos: s 1 d float32, sin: s 1 d float32 -> y: b s h 2 d",
    reference=reference,
    config={"block_sizes": [1, 16]},
    workloads=(
        Workload("llama3_8b_query", b=1, s=8192, h=32, d=64, source=LLAMA),
        Workload("llama3_8b_key", b=1, s=8192, h=8, d=64, source=LLAMA),
    ),
    tolerance={"float32": 1, "bfloat16": 1},
)
def rotary(x: "torch.Tensor", cos: "torch.Tensor", sin: "torch.Tensor") -> "torch.Tensor":
    b, s, _, _, _ = x.size()
    y = torch.empty_like(x)
    most = hl.register_block_size(1, max(1, 2 ** (s.bit_length() - 1)))  # of bfloat16 a block beyond s is not padded as cos is
    for tile_b, tile_s in hl.tile([b, s], block_size=[None, most]):
        c = cos[tile_s, 0, :][None, :, None, :]
        t = sin[tile_s, 0, :][None, :, None, :]
        first = x[tile_b, tile_s, :, 0, :].to(torch.float32)
        second = x[tile_b, tile_s, :, 1, :].to(torch.float32)
        y[tile_b, tile_s, :, 0, :] = (first * c - second * t).to(x.dtype)
        y[tile_b, tile_s, :, 1, :] = (second * c + first * t).to(x.dtype)
    return y


@rotary.backward
@kernel(
    op="tpukern::rotary_backward",
    frontend="helion",
    signature="cos: s 1 d float32, sin: s 1 d float32, dy: b s h 2 d -> dx: b s h 2 d",
    config={"block_sizes": [1, 16]},
)
def rotary_backward(cos: "torch.Tensor", sin: "torch.Tensor", dy: "torch.Tensor") -> "torch.Tensor":
    b, s, _, _, _ = dy.size()
    dx = torch.empty_like(dy)
    most = hl.register_block_size(1, max(1, 2 ** (s.bit_length() - 1)))  # of bfloat16 a block beyond s is not padded as cos is
    for tile_b, tile_s in hl.tile([b, s], block_size=[None, most]):
        c = cos[tile_s, 0, :][None, :, None, :]
        t = sin[tile_s, 0, :][None, :, None, :]
        first = dy[tile_b, tile_s, :, 0, :].to(torch.float32)
        second = dy[tile_b, tile_s, :, 1, :].to(torch.float32)
        dx[tile_b, tile_s, :, 0, :] = (first * c + second * t).to(dy.dtype)
        dx[tile_b, tile_s, :, 1, :] = (second * c - first * t).to(dy.dtype)
    return dx
