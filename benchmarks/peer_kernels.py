"""JAX's own TPU kernels, adopted: what ours are compared with.

    tpukern verify benchmarks/peer_kernels.py:flash
    tpukern compile benchmarks/peer_kernels.py:gmm --target v5e,v6e,v7x

Each is the function of `jax.experimental.pallas.ops.tpu` as it stands. What it cannot do is said as a rule here (`sizes`,
`reject`), so that a call outside of it is refused with a reason.
"""

import functools
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu import flash_attention as jax_flash
from jax.experimental.pallas.ops.tpu import megablox
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

import tpukern
from tpukern import Choice, Target, Workload
from tpukern.dsl import Config, Signature

if TYPE_CHECKING:
    import torch

BF16 = ("bfloat16",)  # their dots state no precision: a TPU rounds float32 operands to bfloat16
LLAMA = "meta-llama/Meta-Llama-3-8B config: 32 heads, 8 KV heads of 128"
MIXTRAL = "mistralai/Mixtral-8x7B config: 8 experts, hidden 4096, intermediate 14336, one shard of 8"


# --- references ------------------------------------------------------------------------------------------------------


def attention_reference(
    q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", causal: bool = False, sm_scale: float = 1.0
) -> "torch.Tensor":
    """q (b, h, i, d) with k, v (b, h, j, d), or any number of leading axes; causal from the top left corner."""
    import torch

    scores = q @ k.transpose(-1, -2) * sm_scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return torch.softmax(scores, -1) @ v


def grouped_reference(lhs: "torch.Tensor", rhs: "torch.Tensor", group_sizes: "torch.Tensor") -> "torch.Tensor":
    """lhs (m, k), rhs (e, k, n), group_sizes (e,): the rows of group e times rhs[e]."""
    import torch

    parts, start = [], 0
    for e, size in enumerate(group_sizes.tolist()):
        parts.append(lhs[start : start + int(size)] @ rhs[e])
        start += int(size)
    return torch.cat(parts)


def paged_reference(
    q: "torch.Tensor", k_pages: "torch.Tensor", v_pages: "torch.Tensor", lengths: "torch.Tensor", page_indices: "torch.Tensor"
) -> "torch.Tensor":
    """q (b, h g, d), pages (h, n, p, d): each sequence attends to the first `lengths` positions of its pages, unscaled."""
    import torch

    outputs = []
    for b, length in enumerate(lengths.tolist()):
        pages = page_indices[b].long()
        k, v = (t[:, pages].flatten(1, 2)[:, : int(length)] for t in (k_pages, v_pages))
        grouped = q[b].unflatten(0, (k.shape[0], -1))
        outputs.append((torch.softmax(grouped @ k.transpose(-1, -2), -1) @ v).flatten(0, 1))
    return torch.stack(outputs)


# --- flash attention -------------------------------------------------------------------------------------------------


def _flash(q: jax.Array, k: jax.Array, v: jax.Array, *, block: int, causal: bool = False, sm_scale: float = 1.0) -> jax.Array:
    rows, columns = (min(block, n) for n in (q.shape[2], k.shape[2]))
    blocks = jax_flash.BlockSizes(
        block_q=rows, block_k_major=columns, block_k=columns, block_b=1, block_q_major_dkv=rows, block_k_major_dkv=columns,
        block_k_dkv=columns, block_q_dkv=rows, block_k_major_dq=columns, block_k_dq=columns, block_q_dq=rows,
    )  # fmt: skip
    return jax_flash.flash_attention(q, k, v, causal=causal, sm_scale=sm_scale, block_sizes=blocks)


def _whole_blocks(*dims: str) -> Any:
    def reject(config: Config, signature: Signature, target: Target | None) -> str | None:
        for name in dims:
            size, block = signature.sizes[name], config["block"]
            if size % min(size, block):
                return f"{name} is {size}, no multiple of block {block}"
        return None

    return reject


flash = tpukern.adopt(
    _flash,
    name="flash",
    op="peers::flash",
    signature="q: b h i d, k: b h j d, v: b h j d -> o: b h i d",
    reference=attention_reference,
    dtypes=BF16,
    tolerance={"bfloat16": 28, "o": 4},  # gradients: log-sum-exp and probabilities pass through bfloat16
    each=("b", "h"),
    sizes={"i": 128, "j": 128, "d": (64, 128, 256)},
    choices={"block": Choice(128, 256, 512, 1024, default=512)},
    reject=_whole_blocks("i", "j"),
    workloads=(
        Workload("llama3_8b_4k", b=1, h=32, i=4096, j=4096, d=128, causal=True, sm_scale=128**-0.5, source=LLAMA),
        Workload("full_4k", b=1, h=32, i=4096, j=4096, d=128, sm_scale=128**-0.5, source=LLAMA),
    ),
)


# --- splash attention ------------------------------------------------------------------------------------------------


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, *, block: int, causal: bool = True) -> jax.Array:
    _, heads, rows, _ = q.shape
    columns = k.shape[2]
    mask: Any = splash_attention_mask.FullMask((rows, columns))
    if causal:
        mask = splash_attention_mask.CausalMask((rows, columns))
    height, width = min(block, rows), min(block, columns)
    blocks = splash_attention_kernel.BlockSizes(
        block_q=height, block_kv=width, block_kv_compute=width, block_q_dkv=height, block_kv_dkv=width,
        block_kv_dkv_compute=width, block_q_dq=height, block_kv_dq=width,
    )  # fmt: skip
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * heads), block_sizes=blocks, head_shards=1, q_seq_shards=1
    )
    return jax.vmap(kernel)(q, k, v)


def splash_reference(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", causal: bool = True) -> "torch.Tensor":
    """Unscaled attention of q (b, h, i, d) to k, v (b, h, j, d)."""
    return attention_reference(q, k, v, causal=causal)


splash = tpukern.adopt(
    _splash,
    name="splash",
    op="peers::splash",
    signature="q: b h i d, k: b h j d, v: b h j d -> o: b h i d",
    reference=splash_reference,
    dtypes=BF16,
    tolerance={"bfloat16": 28, "o": 4},
    each=("b", "h"),
    sizes={"i": 128, "j": 128, "d": (128, 256)},
    choices={"block": Choice(128, 256, 512, 1024, default=512)},
    reject=_whole_blocks("i", "j"),
    workloads=(
        Workload("llama3_8b_4k", b=1, h=32, i=4096, j=4096, d=128, source=LLAMA),
        Workload("full_4k", b=1, h=32, i=4096, j=4096, d=128, causal=False, source=LLAMA),
    ),
)


# --- grouped matmul --------------------------------------------------------------------------------------------------


def _gmm(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, tile_m: int, tile_k: int, tile_n: int) -> jax.Array:
    tiles = (min(tile_m, lhs.shape[0]), min(tile_k, lhs.shape[1]), min(tile_n, rhs.shape[2]))
    return megablox.gmm(lhs, rhs, group_sizes, lhs.dtype, tiles)


def _whole_tiles(config: Config, signature: Signature, target: Target | None) -> str | None:
    m, tile = signature.sizes["m"], config["tile_m"]
    return f"m is {m}, no multiple of tile_m {tile}" if m % min(m, tile) else None


def group_sizes(rng: np.random.Generator, signature: Signature) -> np.ndarray:
    """Returns sizes of groups that add up to all rows; some are empty."""
    groups, rows = signature.sizes["e"], signature.sizes["m"]
    cuts = np.sort(rng.integers(0, rows, groups - 1, endpoint=True))
    return np.diff(np.concatenate([[0], cuts, [rows]]))


def _even(rows: int, groups: int) -> list[int]:
    return [rows // groups] * groups


gmm = tpukern.adopt(
    _gmm,
    name="gmm",
    op="peers::gmm",
    signature="lhs: m k, rhs: e k n, group_sizes: e int32 table -> out: m n",
    reference=grouped_reference,
    dtypes=BF16,
    sizes={"m": 128},
    each=("e",),
    choices={
        "tile_m": Choice(128, 256, 512, default=512),
        "tile_k": Choice(128, 512, 1024, default=1024),
        "tile_n": Choice(128, 512, 1024, default=1024),
    },
    reject=_whole_tiles,
    draw={"group_sizes": group_sizes},
    workloads=(
        Workload(
            "mixtral_up_4k", m=4096, k=4096, n=1792, e=8, tables={"group_sizes": _even(4096, 8)}, source=MIXTRAL
        ),
        Workload(
            "mixtral_up_4k_skewed", m=4096, k=4096, n=1792, e=8, source=MIXTRAL,
            tables={"group_sizes": [2000, 17, 900, 0, 300, 500, 79, 300]},
        ),
    ),
)  # fmt: skip


# --- paged attention -------------------------------------------------------------------------------------------------


def lengths(rng: np.random.Generator, signature: Signature) -> np.ndarray:
    """Returns lengths of at least one position."""
    longest = signature.sizes["s"] * signature.sizes["p"]
    return rng.integers(1, longest, signature.sizes["b"], endpoint=True)


def pages(rng: np.random.Generator, signature: Signature) -> np.ndarray:
    """Returns the page of every place of a sequence."""
    return rng.integers(0, signature.sizes["n"], (signature.sizes["b"], signature.sizes["s"]))


def _in_blocks(config: Config, signature: Signature, target: Target | None) -> str | None:
    places, block = signature.sizes["s"], config["pages_per_compute_block"]
    return f"s is {places}, no multiple of pages_per_compute_block {block}" if places % block else None


_RNG = np.random.default_rng(0)

paged = tpukern.adopt(
    functools.partial(paged_attention),
    name="paged",
    op="peers::paged",
    signature="q: b (h g) d, k_pages: h n p d, v_pages: h n p d, lengths: b int32 table, page_indices: b s int32 table"
    " -> o: b (h g) d",
    reference=paged_reference,
    dtypes=BF16,
    statics=(),
    each=("b", "h"),
    sizes={"d": (128, 256), "g": (8, 16), "p": (16, 32), "s": 4, "n": (8, 16, 64, 2048)},
    choices={"pages_per_compute_block": Choice(4, 8, 16, default=4)},
    reject=_in_blocks,
    draw={"lengths": lengths, "page_indices": pages},
    workloads=(
        Workload(
            "decode_16x1k", b=16, h=8, g=8, d=128, n=2048, p=16, s=64, directions=("forward",),
            tables={
                "lengths": _RNG.integers(1, 1024, 16, endpoint=True).tolist(),
                "page_indices": _RNG.permutation(2048)[:1024].reshape(16, 64).tolist(),
            },
            source="64 query heads over 8 KV heads of 128, 16 sequences of up to 1024 tokens",
        ),
    ),
)  # fmt: skip
