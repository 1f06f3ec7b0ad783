"""A linear layer with its activation, in Helion: the op of the Pallas kernel `linear`, to compare the two frontends by.

    y = act(x w^T + b),  act: none or relu

Shapes: x (*m, k); w (n, k); b (n,); y (*m, n). float32 or bfloat16, summed in float32 and rounded once, after the activation;
float32 operands at the highest precision (Helion's `dot_precision="ieee"`). The backward is that of `linear`, in Pallas.
"""

from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp

from tpukern.dsl import F32, Workload, kernel
from tpukern.kernels.matmul import matmul, product_tn

if TYPE_CHECKING:
    import helion.language as hl
    import torch

VIT = "google/vit-large-patch16-224 config: hidden_size 1024, intermediate_size 4096, 197 tokens an image"


def reference(x: "torch.Tensor", w: "torch.Tensor", b: "torch.Tensor", *, act: str) -> "torch.Tensor":
    import torch

    y = torch.nn.functional.linear(x, w, b)
    return torch.relu(y) if act == "relu" else y


@kernel(
    op="tpukern::linear_helion",
    frontend="helion",
    signature="x: *m k, w: n k, b: n -> y: *m n",
    reference=reference,
    config={"block_sizes": [256, 256, 512]},
    settings={"dot_precision": "ieee"},
    workloads=(Workload("vit_l16_mlp", m=64 * 197, k=1024, n=4096, act="relu", source=VIT),),
    tolerance={"float32": 2, "bfloat16": 2},
)
def linear_helion(
    x: "torch.Tensor", w: "torch.Tensor", b: "torch.Tensor", act: Literal["none", "relu"] = "none"
) -> "torch.Tensor":
    m, k = x.size()
    n, _ = w.size()
    y = torch.empty([m, n], dtype=x.dtype, device=x.device)
    for tile_m, tile_n in hl.tile([m, n]):
        acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(k):
            acc = torch.addmm(acc, x[tile_m, tile_k], w[tile_n, tile_k].T)
        z = acc + b[tile_n].to(torch.float32)[None, :]
        if act == "relu":
            z = torch.relu(z)
        y[tile_m, tile_n] = z.to(x.dtype)
    return y


@linear_helion.backward
def linear_helion_backward(x: jax.Array, w: jax.Array, y: jax.Array, dy: jax.Array, act: str = "none") -> dict[str, jax.Array]:
    dz = dy if act == "none" else jnp.where(y > 0, dy, jnp.zeros_like(dy))  # the output tells where the slope is 1
    db = jnp.sum(dz.astype(F32), axis=tuple(range(dz.ndim - 1)))
    return {"dx": matmul(dz, w), "dw": product_tn(dz, x), "db": db.astype(w.dtype)}
