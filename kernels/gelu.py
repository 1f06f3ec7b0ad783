"""GELU, and the gated product that GEGLU feed-forward blocks take, in Helion.

    gelu:  y = gelu(x)          geglu: y = gelu(gate) * up
    gelu(z) = z / 2 * (1 + tanh(sqrt(2/pi) * (z + 0.044715 z^3)))        the tanh form, as in GPT-2 and Gemma

Shapes: all (*m, f). float32 or bfloat16; computed in float32 and rounded once. No limits on sizes. ATen has no geglu, and its
gelu fuses with its neighbours: model code calls `tpukern::geglu` and `tpukern::gelu_tanh`.

1 + tanh(u) is computed as 2 sigmoid(2u): it keeps its digits where z is far below zero.

Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016; Shazeer, GLU Variants Improve Transformer, 2020.
"""

from typing import TYPE_CHECKING

from tpukern.dsl import Workload, kernel

if TYPE_CHECKING:
    import helion.language as hl
    import torch

TWICE_ROOT = 1.5957691216057308  # 2 sqrt(2/pi)
CUBIC = 0.044715
GEMMA = "google/gemma-2-9b config: intermediate_size 14336, hidden_activation gelu_pytorch_tanh"


def gelu_reference(x: "torch.Tensor") -> "torch.Tensor":
    import torch

    return torch.nn.functional.gelu(x, approximate="tanh")


def geglu_reference(gate: "torch.Tensor", up: "torch.Tensor") -> "torch.Tensor":
    import torch

    return torch.nn.functional.gelu(gate, approximate="tanh") * up


@kernel(
    op="tpukern::gelu_tanh",
    frontend="helion",
    signature="x: *m f -> y: *m f",
    reference=gelu_reference,
    config={"block_sizes": [128, 1024]},
    workloads=(Workload("gpt2_xl", m=8 * 1024, f=6400, source="openai-community/gpt2-xl config: n_embd 1600, 4 x 1600"),),
    tolerance={"float32": 20, "bfloat16": 1},
)
def gelu_tanh(x: "torch.Tensor") -> "torch.Tensor":
    m, f = x.size()
    y = torch.empty_like(x)
    for tile_m, tile_f in hl.tile([m, f]):
        z = x[tile_m, tile_f].to(torch.float32)
        y[tile_m, tile_f] = (z * torch.sigmoid(TWICE_ROOT * (z + CUBIC * z * z * z))).to(x.dtype)
    return y


@gelu_tanh.backward
@kernel(
    op="tpukern::gelu_tanh_backward",
    frontend="helion",
    signature="x: *m f, dy: *m f -> dx: *m f",
    config={"block_sizes": [128, 1024]},
)
def gelu_tanh_backward(x: "torch.Tensor", dy: "torch.Tensor") -> "torch.Tensor":
    m, f = x.size()
    dx = torch.empty_like(x)
    for tile_m, tile_f in hl.tile([m, f]):
        z = x[tile_m, tile_f].to(torch.float32)
        s = torch.sigmoid(TWICE_ROOT * (z + CUBIC * z * z * z))
        t = torch.sigmoid(-TWICE_ROOT * (z + CUBIC * z * z * z))
        slope = s + z * s * t * TWICE_ROOT * (1.0 + 3.0 * CUBIC * z * z)
        dx[tile_m, tile_f] = (dy[tile_m, tile_f].to(torch.float32) * slope).to(x.dtype)
    return dx


@kernel(
    op="tpukern::geglu",
    frontend="helion",
    signature="gate: *m f, up: *m f -> y: *m f",
    reference=geglu_reference,
    config={"block_sizes": [128, 1024]},
    workloads=(
        Workload("gemma2_9b_prefill", m=8192, f=14336, source=GEMMA),
        Workload("t5_v1_1_xl", dtype="float32", m=4096, f=5120, source="google/t5-v1_1-xl config: d_ff 5120, gated-gelu"),
    ),
    tolerance={"float32": 20, "bfloat16": 1},
)
def geglu(gate: "torch.Tensor", up: "torch.Tensor") -> "torch.Tensor":
    m, f = gate.size()
    y = torch.empty_like(gate)
    for tile_m, tile_f in hl.tile([m, f]):
        z = gate[tile_m, tile_f].to(torch.float32)
        u = up[tile_m, tile_f].to(torch.float32)
        y[tile_m, tile_f] = (z * torch.sigmoid(TWICE_ROOT * (z + CUBIC * z * z * z)) * u).to(gate.dtype)
    return y


@geglu.backward
@kernel(
    op="tpukern::geglu_backward",
    frontend="helion",
    signature="gate: *m f, up: *m f, dy: *m f -> dgate: *m f, dup: *m f",
    config={"block_sizes": [128, 1024]},
)
def geglu_backward(gate: "torch.Tensor", up: "torch.Tensor", dy: "torch.Tensor") -> tuple["torch.Tensor", "torch.Tensor"]:
    m, f = gate.size()
    dgate = torch.empty_like(gate)
    dup = torch.empty_like(up)
    for tile_m, tile_f in hl.tile([m, f]):
        z = gate[tile_m, tile_f].to(torch.float32)
        g = dy[tile_m, tile_f].to(torch.float32)
        s = torch.sigmoid(TWICE_ROOT * (z + CUBIC * z * z * z))
        t = torch.sigmoid(-TWICE_ROOT * (z + CUBIC * z * z * z))
        slope = s + z * s * t * TWICE_ROOT * (1.0 + 3.0 * CUBIC * z * z)
        dgate[tile_m, tile_f] = (g * up[tile_m, tile_f].to(torch.float32) * slope).to(gate.dtype)
        dup[tile_m, tile_f] = (g * z * s).to(up.dtype)
    return dgate, dup
