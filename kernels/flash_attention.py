"""Scaled dot-product attention without its score matrix in memory.

    o = softmax(scale * q k^T) v,  lse = log(sum(exp(scale * q k^T)))        per query

Shapes: q (*b, h, i, d), k (*b, hk, j, d), v (*b, hk, j, e), o (*b, h, i, e), lse (*b, h, i); h is a multiple of hk and query
head h uses key head h // (h / hk). ``causal``: query i sees the keys j <= i, aligned at the first of both (ATen's is_causal).
float32 or bfloat16; scores, running maximum, sums and outputs accumulate in float32; p is rounded to the element type before
it meets v. Limits: d and e lie whole in a block (32 to 256 are tested); masks and dropout are ATen's.

Source: Dao et al., FlashAttention, 2022, and FlashAttention-2, 2023. Statistics are kept replicated over the 128 lanes: a
column (i, 1) fills one lane of 128 and was predicted twice as slow on v5e and v6e. Exponentials are powers of two, with
log2(e) in the float32 scale. The backward of keys and values works on transposed scores (j, i), so that lse and delta are
rows that broadcast and no operand of its products is transposed.
"""

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tpukern.dsl import F32, Acc, Block, Dim, Each, In, Out, Override, Ref, Scratch, Workload, dot, kernel

if TYPE_CHECKING:
    from torch import Tensor

LANES = 128
LOG2E = math.log2(math.e)
LOWEST = float(jnp.finfo(F32).min)  # below every score, yet finite: a key that is left out, -inf, has weight 0 even beside it
LAST_LAST = ((1,), (1,))  # both operands contract their last axis
MAX_HEAD_DIM = 256

CUDNN = "aten::_scaled_dot_product_cudnn_attention"
CUDNN_BACKWARD = f"{CUDNN}_backward"
OVERRIDEABLE = "aten::_scaled_dot_product_fused_attention_overrideable"
OVERRIDEABLE_BACKWARD = f"{OVERRIDEABLE}_backward"
PHILOX = ("philox_seed", "philox_offset")  # free without dropout: they carry whose forward pass it was

LLAMA = "meta-llama/Meta-Llama-3-8B config: 32 heads, 8 key heads of 128"
QWEN = "Qwen/Qwen3-8B config: 32 heads, 8 key heads of 128"
QWEN_MOE = "Qwen/Qwen3-30B-A3B config: 32 heads, 4 key heads of 128"
VIT = "google/vit-large-patch16-224 config: 16 heads of 64, 197 tokens; 64 images"


def reference(q: "Tensor", k: "Tensor", v: "Tensor", *, scale: float | None, causal: bool) -> "Tensor":
    """ATen's attention."""
    import torch

    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


def unsupported(q: "Tensor", k: "Tensor", v: "Tensor", attn_bias: "Tensor | None", dropout_p: float) -> str | None:
    """Why ATen's own kernel has to serve this call, or None; asks only for what forward and backward both see."""
    if attn_bias is not None:
        return "there is a mask"
    if dropout_p != 0.0:
        return f"dropout_p is {dropout_p}"
    if str(q.dtype) not in ("torch.float32", "torch.bfloat16"):
        return f"the query is {q.dtype}, the kernel has float32 and bfloat16"
    if not q.dtype == k.dtype == v.dtype:
        return f"query, key and value are {q.dtype}, {k.dtype} and {v.dtype}"
    if not q.dim() == k.dim() == v.dim() or q.dim() < 3:
        return f"query, key and value have ranks {q.dim()}, {k.dim()} and {v.dim()}"
    if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        return f"batch axes {list(q.shape[:-3])}, {list(k.shape[:-3])} and {list(v.shape[:-3])} differ"
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        return None  # no kernel's; ours says so, where torch_tpu's ends the process
    if k.shape[-3] != v.shape[-3]:
        return f"there are {k.shape[-3]} key heads and {v.shape[-3]} value heads"
    if 0 in (*q.shape, *k.shape, *v.shape):
        return "an input is empty"
    if q.shape[-3] % k.shape[-3]:
        return f"{q.shape[-3]} query heads are no multiple of {k.shape[-3]} key heads"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        return f"a head dimension is {max(q.shape[-1], v.shape[-1])}, the kernel takes up to {MAX_HEAD_DIM}"
    return None


def memory_order(x: "Tensor") -> tuple[int, ...]:
    """Axes of `x`, outermost in memory first: the layout that ATen promises for what is shaped like `x`."""
    return tuple(sorted(range(x.dim()), key=x.stride, reverse=True))


# The overrides below name ATen's optional arguments as ATen does, with their defaults: then dispatch calls them as they are.
# fmt: off
def cudnn_cond(
    q: "Tensor", k: "Tensor", v: "Tensor", attn_bias: "Tensor | None", compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> str | None:
    return unsupported(q, k, v, attn_bias, dropout_p)


def cudnn_impl(
    q: "Tensor", k: "Tensor", v: "Tensor", attn_bias: "Tensor | None", compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:
    out, lse, *rest = overrideable_impl(q, k, v, is_causal=is_causal, scale=scale)
    return out, lse.unsqueeze(-1), *rest


def overrideable_cond(
    q: "Tensor", k: "Tensor", v: "Tensor", attn_bias: "Tensor | None" = None, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> str | None:
    return unsupported(q, k, v, attn_bias, dropout_p)


def overrideable_impl(
    q: "Tensor", k: "Tensor", v: "Tensor", attn_bias: "Tensor | None" = None, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:
    """Returns out, lse, cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset (tokens) and the debug mask."""
    out, lse = flash_attention.launch(q, k, v, layouts={"o": memory_order(q)}, scale=scale, causal=is_causal)
    return out, lse, None, None, q.shape[-2], k.shape[-2], None, None, None


def gradients(
    q: "Tensor", k: "Tensor", v: "Tensor", out: "Tensor", lse: "Tensor", grad: "Tensor", causal: bool, scale: float | None
) -> tuple["Tensor", ...]:
    layouts = {"dq": memory_order(q), "dk": memory_order(k), "dv": memory_order(v)}
    results: tuple[Tensor, ...] = flash_attention_backward.launch(
        q, k, v, out, lse, grad, layouts=layouts, scale=scale, causal=causal
    )
    return results


def cudnn_backward_cond(
    grad: "Tensor", q: "Tensor", k: "Tensor", v: "Tensor", out: "Tensor", lse: "Tensor", seed: Any, offset: Any,
    attn_bias: "Tensor | None", cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout_p: float, causal: bool,
    *, scale: float | None = None,
) -> str | None:
    return unsupported(q, k, v, attn_bias, dropout_p)


def cudnn_backward_impl(
    grad: "Tensor", q: "Tensor", k: "Tensor", v: "Tensor", out: "Tensor", lse: "Tensor", seed: Any, offset: Any,
    attn_bias: "Tensor | None", cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout_p: float, causal: bool,
    *, scale: float | None = None,
) -> tuple["Tensor", ...]:
    return gradients(q, k, v, out, lse.squeeze(-1), grad, causal, scale)


def overrideable_backward_cond(
    grad: "Tensor", q: "Tensor", k: "Tensor", v: "Tensor", attn_bias: "Tensor | None", mask: list[bool], out: "Tensor",
    lse: "Tensor", cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout_p: float, causal: bool, seed: Any, offset: Any,
    *, scale: float | None = None,
) -> str | None:
    return unsupported(q, k, v, attn_bias, dropout_p)


def overrideable_backward_impl(
    grad: "Tensor", q: "Tensor", k: "Tensor", v: "Tensor", attn_bias: "Tensor | None", mask: list[bool], out: "Tensor",
    lse: "Tensor", cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout_p: float, causal: bool, seed: Any, offset: Any,
    *, scale: float | None = None,
) -> tuple["Tensor | None", ...]:
    return *gradients(q, k, v, out, lse, grad, causal, scale), None
# fmt: on


def visible(i: Dim, causal: bool) -> tuple[int, jax.Array] | None:
    """Keys that some query of block `i` sees: first, one past the last."""
    return (0, i.stop) if causal else None


def seeing(j: Dim, causal: bool) -> tuple[jax.Array, None] | None:
    """Queries that see some key of block `j`."""
    return (j.start, None) if causal else None


def exponent_scale(scale: float | None, head_dim: int) -> float:
    return (head_dim**-0.5 if scale is None else scale) * LOG2E


def raw_scale(scale: float | None, head_dim: int) -> float:
    """What is left to multiply the difference of two `raw_scores` with."""
    factor = exponent_scale(scale, head_dim)
    return factor if factor > 0 else 1.0


def raw_scores(q: jax.Array, k: jax.Array, scale: float | None) -> jax.Array:
    """Scores of which the greatest is the greatest, scaled after it is subtracted: exactly 0 is left of it, with fma too.

    Scaled before, a compiler that fuses the two leaves the product's rounding error: 2**7 at scores of 2e9, whose power of two
    is infinite or 0. Only a scale that is not positive, which makes the greatest the least, comes first.
    """
    factor, s = exponent_scale(scale, q.shape[-1]), dot(q, k, LAST_LAST)
    return s if factor > 0 else s * factor


def spread(statistic: jax.Array, width: int) -> jax.Array:
    """A statistic (i, 128), equal in all lanes, as (i, width)."""
    return jnp.tile(statistic, (1, -(-width // LANES)))[:, :width]


def lane_sums(p: jax.Array) -> jax.Array:
    """Sums of each row of `p` as 128 partial ones: whole registers are added, the sum across lanes is left for the end."""
    if p.shape[1] % LANES == 0:
        return sum(p[:, at : at + LANES] for at in range(LANES, p.shape[1], LANES)) + p[:, :LANES]
    whole = jnp.sum(p, axis=1, keepdims=True)
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, (p.shape[0], LANES), 1) == 0, whole, 0.0)


@kernel(
    op="tpukern::flash_attention",
    reference=reference,
    overrides=(
        Override(CUDNN, impl=cudnn_impl, cond=cudnn_cond, flips_with=(CUDNN_BACKWARD,), token=PHILOX),
        Override(CUDNN_BACKWARD, impl=cudnn_backward_impl, cond=cudnn_backward_cond, flips_with=(CUDNN,), token=PHILOX),
        Override(
            OVERRIDEABLE, impl=overrideable_impl, cond=overrideable_cond, flips_with=(OVERRIDEABLE_BACKWARD,), token=PHILOX
        ),
        Override(
            OVERRIDEABLE_BACKWARD,
            impl=overrideable_backward_impl,
            cond=overrideable_backward_cond,
            flips_with=(OVERRIDEABLE,),
            token=PHILOX,
        ),
    ),
    workloads=(
        Workload("llama3_8b_prefill", b=1, hk=8, g=4, i=8192, j=8192, d=128, e=128, causal=True, source=LLAMA),
        Workload("llama3_8b_train", b=4, hk=8, g=4, i=4096, j=4096, d=128, e=128, causal=True, source=LLAMA),
        Workload("qwen3_8b_f32", dtype="float32", b=1, hk=8, g=4, i=2048, j=2048, d=128, e=128, causal=True, source=QWEN),
        Workload("qwen3_30b_a3b_prefill", b=1, hk=4, g=8, i=8192, j=8192, d=128, e=128, causal=True, source=QWEN_MOE),
        Workload("vit_l16", b=64, hk=16, g=1, i=197, j=197, d=64, e=64, source=VIT),
    ),
    # With the chip's exponentials of 18 bits o errs by 4.4 in float32 (2.4 with exact ones), dv by 14.
    tolerance={"float32": 28, "bfloat16": 4, "o": 4, "o float32": 12},
)
def flash_attention(
    q: Ref = In("*b (hk g) i d"),
    k: Ref = In("*b hk j d"),
    v: Ref = In("*b hk j e"),
    o: Ref = Out("*b (hk g) i e"),
    lse: Ref = Out("*b (hk g) _ i", "float32", saved=True),
    top: Ref = Acc("i 128", init=LOWEST),  # running maximum, equal in all lanes
    tot: Ref = Acc("i 128"),  # 128 partial sums
    acc: Ref = Acc("i e"),
    *,
    scale: float | None = None,
    causal: bool = False,
    b: Dim = Each(),
    hk: Dim = Each(),
    g: Dim = Each(),
    i: Dim = Block(128, 256, 512, 1024, 2048, default=512),
    j: Dim = Block(128, 256, 512, 1024, 2048, default=1024, span=visible),
) -> None:
    @pl.when(j.live)
    def _() -> None:
        s = raw_scores(q[...], k[...], scale)
        s = j.mask(s, 1, -jnp.inf)
        if causal:
            s = jnp.where(i.positions(s.shape, 0) >= j.positions(s.shape, 1), s, -jnp.inf)
        new = jnp.maximum(top[...], jnp.max(s, axis=1, keepdims=True))
        p = jnp.exp2((s - spread(new, s.shape[1])) * raw_scale(scale, q.shape[-1]))
        keep = jnp.exp2((top[...] - new) * raw_scale(scale, q.shape[-1]))
        tot[...] = keep * tot[...] + lane_sums(p)
        acc[...] = spread(keep, acc.shape[1]) * acc[...] + dot(p.astype(v.dtype), v[...])
        top[...] = new

    @pl.when(j.last)
    def _() -> None:
        total = jnp.sum(tot[...], axis=1, keepdims=True)
        total = jnp.where(total == 0.0, 1.0, total)  # all scores are -inf: zeros, as ATen has it
        o[...] = (acc[...] / total).astype(o.dtype)
        lse[...] = (top[:, :1] * (raw_scale(scale, q.shape[-1]) / LOG2E) + jnp.log(total)).T


@kernel
def flash_attention_dkv(
    q: Ref = In("*b (hk g) i d"),
    k: Ref = In("*b hk j d"),
    v: Ref = In("*b hk j e"),
    do: Ref = In("*b (hk g) i e"),
    lse: Ref = In("*b (hk g) _ i", "float32"),
    delta: Ref = In("*b (hk g) _ i", "float32"),
    dk: Ref = Out("*b hk j d"),
    dv: Ref = Out("*b hk j e"),
    dk_acc: Ref = Acc("j d"),
    dv_acc: Ref = Acc("j e"),
    *,
    scale: float | None = None,
    causal: bool = False,
    b: Dim = Each(),
    hk: Dim = Each(),
    j: Dim = Block(128, 256, 512, 1024, default=512),
    g: Dim = Each(),
    i: Dim = Block(128, 256, 512, 1024, default=512, span=seeing),
) -> None:
    """Gradients of keys and values; scores are transposed, (j, i)."""

    @pl.when(i.live)
    def _() -> None:
        s = dot(k[...], q[...], LAST_LAST) * exponent_scale(scale, q.shape[-1])
        p = jnp.exp2(s - lse[...] * LOG2E)
        if causal:
            p = jnp.where(i.positions(s.shape, 1) >= j.positions(s.shape, 0), p, 0.0)
        ds = p * (dot(v[...], do[...], LAST_LAST) - delta[...])
        dv_acc[...] += dot(p.astype(do.dtype), do[...])
        dk_acc[...] += dot(ds.astype(q.dtype), q[...])

    @pl.when(g.last & i.last)
    def _() -> None:
        dk[...] = (dk_acc[...] * (exponent_scale(scale, q.shape[-1]) / LOG2E)).astype(dk.dtype)
        dv[...] = dv_acc[...].astype(dv.dtype)


@kernel
def flash_attention_dq(
    q: Ref = In("*b (hk g) i d"),
    k: Ref = In("*b hk j d"),
    v: Ref = In("*b hk j e"),
    do: Ref = In("*b (hk g) i e"),
    lse: Ref = In("*b (hk g) _ i", "float32"),
    delta: Ref = In("*b (hk g) _ i", "float32"),
    dq: Ref = Out("*b (hk g) i d"),
    acc: Ref = Acc("i d"),
    top: Ref = Scratch("i 128"),  # lse and delta, replicated over lanes
    mean: Ref = Scratch("i 128"),
    *,
    scale: float | None = None,
    causal: bool = False,
    b: Dim = Each(),
    hk: Dim = Each(),
    g: Dim = Each(),
    i: Dim = Block(128, 256, 512, 1024, default=512),
    j: Dim = Block(128, 256, 512, 1024, default=512, span=visible),
) -> None:
    """Gradient of queries."""

    @pl.when(j.first)
    def _() -> None:
        top[...] = jnp.broadcast_to((lse[...] * LOG2E).T, top.shape)
        mean[...] = jnp.broadcast_to(delta[...].T, mean.shape)

    @pl.when(j.live)
    def _() -> None:
        s = dot(q[...], k[...], LAST_LAST) * exponent_scale(scale, q.shape[-1])
        p = j.mask(jnp.exp2(s - spread(top[...], s.shape[1])), 1, 0.0)  # 2**-lse of a filled key may be infinite
        if causal:
            p = jnp.where(i.positions(s.shape, 0) >= j.positions(s.shape, 1), p, 0.0)
        ds = p * (dot(do[...], v[...], LAST_LAST) - spread(mean[...], s.shape[1]))
        acc[...] += dot(ds.astype(k.dtype), k[...])

    @pl.when(j.last)
    def _() -> None:
        dq[...] = (acc[...] * (exponent_scale(scale, q.shape[-1]) / LOG2E)).astype(dq.dtype)


@flash_attention.backward
def flash_attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    o: jax.Array,
    lse: jax.Array,
    do: jax.Array,
    scale: float | None = None,
    causal: bool = False,
) -> dict[str, jax.Array]:
    if q.size == 0 or k.size == 0:  # nothing attends
        return {"dq": jnp.zeros_like(q), "dk": jnp.zeros_like(k), "dv": jnp.zeros_like(v)}
    delta = jnp.sum(o.astype(F32) * do.astype(F32), axis=-1)
    dk, dv = flash_attention_dkv(q, k, v, do, lse, delta, scale=scale, causal=causal)
    return {"dq": flash_attention_dq(q, k, v, do, lse, delta, scale=scale, causal=causal), "dk": dk, "dv": dv}
