"""Rows of a small table looked up by number, in Helion: learned positions, token types, experts.

    y[i] = w[index[i]]

Shapes: index (*b,) int32; w (v, d); y (*b, d). float32 or bfloat16, exact. A number outside of 0 to v - 1 gives a row of zeros.
Limits: all v rows of a block of columns lie in VMEM, and a row is picked by a product with a one-hot matrix, which takes
2 b v d operations: for tables of up to some thousand rows; XLA's own gather is the one for a vocabulary. The backward is the
transposed product, in float32.
"""

from typing import TYPE_CHECKING

from tpukern.dsl import Workload, kernel

if TYPE_CHECKING:
    import helion.language as hl
    import torch

BERT = "google-bert/bert-base-uncased config: max_position_embeddings 512, hidden_size 768"
GPT2 = "openai-community/gpt2-xl config: n_positions 1024, n_embd 1600"


def reference(index: "torch.Tensor", w: "torch.Tensor") -> "torch.Tensor":
    import torch

    return torch.nn.functional.embedding(index.long(), w)


@kernel(
    op="tpukern::embedding",
    frontend="helion",
    signature="index: *b int32, w: v d -> y: *b d",
    reference=reference,
    config={"block_sizes": [256, 256]},
    settings={"dot_precision": "ieee"},
    workloads=(
        Workload("bert_base_positions", b=32 * 512, v=512, d=768, source=BERT),
        Workload("gpt2_xl_positions", dtype="float32", b=8 * 1024, v=1024, d=1600, source=GPT2),
    ),
    tolerance={"float32": 1, "bfloat16": 1},
)
def embedding(index: "torch.Tensor", w: "torch.Tensor") -> "torch.Tensor":
    (b,) = index.size()
    _, d = w.size()
    y = torch.empty([b, d], dtype=w.dtype, device=w.device)
    for tile_b, tile_d in hl.tile([b, d]):
        y[tile_b, tile_d] = w[index[tile_b], tile_d]
    return y


@embedding.backward
@kernel(
    op="tpukern::embedding_backward",
    frontend="helion",
    signature="index: *b int32, w: v d, dy: *b d -> dw: v d",
    config={"block_sizes": [256, 256, 512]},
    settings={"dot_precision": "ieee"},
)
def embedding_backward(index: "torch.Tensor", w: "torch.Tensor", dy: "torch.Tensor") -> "torch.Tensor":
    v, d = w.size()
    (b,) = index.size()
    dw = torch.empty_like(w)
    for tile_v, tile_d in hl.tile([v, d]):
        acc = hl.zeros([tile_v, tile_d], dtype=torch.float32)
        for tile_b in hl.tile(b):
            hot = torch.where(index[tile_b][None, :] == tile_v.index[:, None], 1.0, 0.0).to(dy.dtype)
            acc = torch.addmm(acc, hot, dy[tile_b, tile_d])
        dw[tile_v, tile_d] = acc.to(w.dtype)
    return dw
