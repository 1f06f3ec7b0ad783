"""What XLA:CPU cannot run of torch_tpu's own lowerings, and what the emulated device does instead.

Two means, neither ever used on a TPU:

- `xla_flags`: scans (cumsum, cumprod, logcumsumexp, embedding_bag, repeat_interleave, segment_reduce) are native, with one pass
  of XLA:CPU left out that aborts the process on them.
- `REPLACEMENTS`: ATen ops that torch_tpu lowers to what only a TPU has, composed here of ops that it lowers to StableHLO.
  `install` puts them where torch_tpu's kernels are, below autograd and below tpukern's own overrides: an override that
  refuses a call falls through to them.

An op that torch_tpu has not for a TPU either (``_int_mm``) is not supplied: a model that runs here must run there.
"""

import functools
import importlib
import pathlib
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

# XLA:CPU turns an associative scan into calls inside a fusion, and its own fusion emitter aborts the process on these. Without
# this pass a scan becomes a while loop.
_DISABLED_PASSES = ("associative-scan-rewriter",)
_DISABLE = "--xla_disable_hlo_passes="


def xla_flags(before: str | None) -> str:
    """Returns XLA_FLAGS for the emulated device: the user's, with the passes added that abort XLA:CPU.

    Args:
        before: The user's value: flags, or the name of a file that holds them.
    """
    text = before or ""
    if text and not text.lstrip().startswith("-"):
        try:
            text = pathlib.Path(text).read_text()
        except OSError:
            text = ""
    flags = text.split()
    disabled = [name for flag in flags if flag.startswith(_DISABLE) for name in flag.removeprefix(_DISABLE).split(",") if name]
    disabled += [name for name in _DISABLED_PASSES if name not in disabled]
    return " ".join([*(flag for flag in flags if not flag.startswith(_DISABLE)), _DISABLE + ",".join(disabled)])


def cudnn_attention(
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
    """The other fused attention in place of torch_tpu's Mosaic one; only the shape of the log-sum-exp differs."""
    out, log_sum_exp, *rest = _aten()._scaled_dot_product_fused_attention_overrideable(
        query, key, value, attn_bias, dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return (out, log_sum_exp.unsqueeze(-1), *rest)


def cudnn_attention_backward(
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
) -> tuple[Any, ...]:
    """The backward pass of `cudnn_attention`."""
    grads = _aten()._scaled_dot_product_fused_attention_overrideable_backward(
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
        philox_seed,
        philox_offset,
        scale=scale,
    )
    return tuple(grads[:3])


def grouped_mm(self: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """A matrix product for each group of rows, columns or summed elements, where ``offs`` holds the ends of the groups.

    torch_tpu lowers it to ``ragged-dot``, which XLA:CPU has not. Every group is multiplied whole here, with zeros in the
    elements that are not its own: exact, and as many times as much work as there are groups.
    """
    torch = importlib.import_module("torch")
    groups = None if offs is None else offs.numel()
    if self.dim() == 2 and mat2.dim() == 3:  # rows of self
        product = torch.bmm(_masked(self, offs, 0), mat2).sum(0)
    elif self.dim() == 3 and mat2.dim() == 2:  # columns of mat2
        product = torch.bmm(self, _masked(mat2, offs, 1)).sum(0)
    elif groups is not None:  # summed elements
        product = torch.bmm(_masked(self, offs, 1), mat2.expand(groups, *mat2.shape))
    else:
        product = torch.bmm(self, mat2)
    return product if out_dtype is None else product.to(out_dtype)


def _masked(matrix: Any, offs: Any, dim: int) -> Any:
    """Returns (groups, rows, columns): the matrix once for each group, zero outside the group along ``dim``."""
    torch = importlib.import_module("torch")
    place = torch.arange(matrix.shape[dim], device=matrix.device, dtype=offs.dtype)
    starts = torch.cat([offs.new_zeros(1), offs[:-1]])
    own = (place >= starts[:, None]) & (place < offs[:, None])
    own = own[:, :, None] if dim == 0 else own[:, None, :]
    return torch.where(own, matrix, torch.zeros((), device=matrix.device, dtype=matrix.dtype))


REPLACEMENTS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "_scaled_dot_product_cudnn_attention": cudnn_attention,
        "_scaled_dot_product_cudnn_attention_backward": cudnn_attention_backward,
        "_grouped_mm": grouped_mm,
    }
)


@functools.cache
def install() -> Any:
    """Puts the replacements in torch_tpu's place, for the rest of the process."""
    torch = importlib.import_module("torch")
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        for name, function in REPLACEMENTS.items():
            library.impl(name, function, "PrivateUse1", allow_override=True)
    return library


def _aten() -> Any:
    return importlib.import_module("torch").ops.aten
