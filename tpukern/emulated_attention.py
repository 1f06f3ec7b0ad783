"""Attention on the emulated device, in place of torch_tpu's Mosaic kernel that only a TPU runs.

Without dropout it is torch_tpu's other fused attention, which it lowers to StableHLO. That one takes ``dropout_p`` and ignores
it, so with dropout the attention is composed here: the mask is a hash of the element's place and of a seed, which the
forward pass draws and saves where ATen keeps its Philox seed, and the backward pass makes the same mask of it.

`fused` and `fused_backward` stand around torch_tpu's fused attention: it ends the process, or fails without a word of why, on
sizes that do not fit, and of a mask and ``is_causal`` together it leaves the mask out.
"""

import importlib
from collections.abc import Callable
from typing import Any

from tpukern.errors import DeviceError


def fused(
    native: Callable[..., Any],
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """``aten::_scaled_dot_product_fused_attention_overrideable``."""
    check("aten::_scaled_dot_product_fused_attention_overrideable", query, key, value)
    attn_bias, is_causal = _one_mask(query, key, attn_bias, is_causal)
    return native(query, key, value, attn_bias, dropout_p, is_causal, return_debug_mask, scale=scale)


def fused_backward(
    native: Callable[..., Any], grad_out: Any, query: Any, key: Any, value: Any, attn_bias: Any, *rest: Any, **keywords: Any
) -> Any:
    """``aten::_scaled_dot_product_fused_attention_overrideable_backward``."""
    mask, out, log_sum_exp, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *seeds = rest
    attn_bias, is_causal = _one_mask(query, key, attn_bias, is_causal)
    counted = (cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *seeds)
    return native(grad_out, query, key, value, attn_bias, mask, out, log_sum_exp, *counted, **keywords)


def check(op: str, query: Any, key: Any, value: Any) -> None:
    """Raises DeviceError if the sizes do not fit."""
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if query.shape[-1] != key.shape[-1]:
        raise DeviceError(op, shapes, "one head dimension in query and key")
    if key.shape[-2] != value.shape[-2]:
        raise DeviceError(op, shapes, "as many values as keys")
    if query.dim() > 3 and not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise DeviceError(op, shapes, "equal batch sizes", "Expand them.")
    if query.dim() > 2 and key.shape[-3] != value.shape[-3]:
        raise DeviceError(op, shapes, "as many value heads as key heads", "Repeat them.")


def _one_mask(query: Any, key: Any, attn_bias: Any, is_causal: bool) -> tuple[Any, bool]:
    """Joins a mask and ``is_causal``."""
    if attn_bias is None or not is_causal:
        return attn_bias, is_causal
    torch = importlib.import_module("torch")
    ones = torch.ones(query.shape[-2], key.shape[-2], device=query.device, dtype=torch.bool)
    return torch.where(
        torch.tril(ones), attn_bias, torch.full((), -torch.inf, device=query.device, dtype=attn_bias.dtype)
    ), False


def forward(
    query: Any,
    key: Any,
    value: Any,
    attn_bias: Any,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """``aten::_scaled_dot_product_cudnn_attention``: the log-sum-exp is (batch, heads, queries, 1) in float32."""
    torch = importlib.import_module("torch")
    if dropout_p > 0:
        check("aten::_scaled_dot_product_cudnn_attention", query, key, value)
        seed = torch.randint(0, 2**31, (), device=query.device, dtype=torch.int64)
        scores = _scores(query, key, attn_bias, is_causal, scale)
        log_sum_exp = torch.logsumexp(scores, -1, keepdim=True)
        weights = _weights(scores, log_sum_exp) * _kept(seed, scores, dropout_p)
        out = torch.matmul(weights, _expanded(value, query).float()).to(query.dtype)
        sizes = query.shape[-2], key.shape[-2]
        return _like(out, query), log_sum_exp, None, None, *sizes, seed, torch.zeros_like(seed), None
    out, log_sum_exp, *rest = torch.ops.aten._scaled_dot_product_fused_attention_overrideable(
        query, key, value, attn_bias, 0.0, is_causal, return_debug_mask, scale=scale
    )
    return out, log_sum_exp.unsqueeze(-1), *rest


def backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    philox_seed: Any,
    philox_offset: Any,
    attn_bias: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Any, Any, Any]:
    """``aten::_scaled_dot_product_cudnn_attention_backward``: gradients of query, key and value."""
    if dropout_p > 0:
        return _dropout_backward(
            grad_out, query, key, value, out, logsumexp, philox_seed, attn_bias, dropout_p, is_causal, scale
        )
    seeds = (philox_seed, philox_offset)
    grads = importlib.import_module("torch").ops.aten._scaled_dot_product_fused_attention_overrideable_backward(
        grad_out,
        query,
        key,
        value,
        attn_bias,
        [True, True, True, False],
        out,
        logsumexp.squeeze(-1),
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        *seeds,
        scale=scale,
    )
    return grads[0], grads[1], grads[2]


def _dropout_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    log_sum_exp: Any,
    seed: Any,
    attn_bias: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Any, Any, Any]:
    torch = importlib.import_module("torch")
    scores = _scores(query, key, attn_bias, is_causal, scale)
    weights, kept, dy = _weights(scores, log_sum_exp), _kept(seed, scores, dropout_p), grad_out.float()
    dvalue = torch.matmul((weights * kept).mT, dy)
    dweights = torch.matmul(dy, _expanded(value, query).float().mT) * kept
    delta = (dy * out.float()).sum(-1, keepdim=True)  # the sum of weights * dweights over the keys
    dscores = weights * (dweights - delta) * _scale(query, scale)
    dquery = torch.matmul(dscores, _expanded(key, query).float())
    dkey = torch.matmul(dscores.mT, query.float())
    pairs = ((dquery, query), (_summed(dkey, key), key), (_summed(dvalue, value), value))
    dq, dk, dv = (_like(gradient.to(x.dtype), x) for gradient, x in pairs)
    return dq, dk, dv


def _scale(query: Any, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def _scores(query: Any, key: Any, attn_bias: Any, is_causal: bool, scale: float | None) -> Any:
    torch = importlib.import_module("torch")
    scores = torch.matmul(query.float(), _expanded(key, query).float().mT) * _scale(query, scale)
    if attn_bias is not None:
        scores = scores + attn_bias.float()
    if is_causal:
        ones = torch.ones(scores.shape[-2:], device=scores.device, dtype=torch.bool)
        scores = torch.where(torch.tril(ones), scores, torch.full((), -torch.inf, device=scores.device))
    return scores


def _weights(scores: Any, log_sum_exp: Any) -> Any:
    """Softmax; a row that is masked whole has weights of zero."""
    torch = importlib.import_module("torch")
    return torch.where(torch.isinf(log_sum_exp), torch.zeros((), device=scores.device), torch.exp(scores - log_sum_exp))


def _kept(seed: Any, like: Any, dropout_p: float) -> Any:
    """Returns 1 / (1 - p) where a weight is kept and 0 where it is dropped."""
    torch = importlib.import_module("torch")
    bits = torch.arange(like.numel(), device=like.device, dtype=torch.int64).reshape(like.shape)
    bits = (bits * 0x9E3779B1 + seed * 0x85EBCA6B) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # Source: the "lowbias32" integer hash of C. Wellons
        bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
    bits = bits ^ (bits >> 16)
    if dropout_p >= 1:
        return torch.zeros(like.shape, device=like.device)
    return (bits >= int(dropout_p * 2**32)).to(torch.float32) / (1 - dropout_p)


def _expanded(x: Any, query: Any) -> Any:
    """Repeats key or value heads for the query heads that share them, and a batch of one for all."""
    repeats = query.shape[-3] // x.shape[-3]
    x = x.unsqueeze(-3).expand(*x.shape[:-2], repeats, *x.shape[-2:]).flatten(-4, -3) if repeats > 1 else x
    return x.expand(*query.shape[:-2], *x.shape[-2:])


def _summed(gradient: Any, x: Any) -> Any:
    """Undoes `_expanded` in a gradient."""
    gradient = gradient.unflatten(-3, (x.shape[-3], gradient.shape[-3] // x.shape[-3])).sum(-3)
    return gradient.sum_to_size(x.shape)


def _like(x: Any, original: Any) -> Any:
    """Gives a tensor the order of dimensions in memory that ATen promises: that of the original."""
    order = sorted(range(original.dim()), key=lambda dim: (-original.stride(dim), dim))
    back = sorted(range(len(order)), key=order.__getitem__)
    return x.permute(order).contiguous().permute(back)
