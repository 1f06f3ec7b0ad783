"""What XLA:CPU cannot run of torch_tpu's own lowerings, and what the emulated device does instead.

Nothing of this is used on a TPU. Of PyTorch's own samples (672 ops, float32, forward and backward, each against the CPU) no
call aborts any more:

- `xla_flags`: scans (cumsum, cumprod, logcumsumexp, embedding_bag, repeat_interleave, segment_reduce) are torch_tpu's own,
  with one pass of XLA:CPU left out that aborts the process on them.
- `REPLACEMENTS`: ATen ops that torch_tpu lowers to what only a TPU has, composed of ops that it lowers to StableHLO.
  `install` puts them where torch_tpu's kernels are, below autograd and below tpukern's own overrides: an override that
  refuses a call falls through to them.
- `AROUND`: a DeviceError in place of a call on which torch_tpu itself ends the process, its attention with a mask that is
  causal besides, and copies to the host that do not
  ask for pinned memory, which XLA:CPU's client has not. Pinning gives a copy in ordinary memory.

What XLA:CPU refuses without aborting raises torch_tpu's error: LU decomposition and what is made of it (``linalg.inv``,
``solve``). An op that torch_tpu has not for a TPU either (``_int_mm``) is not supplied: a model that runs here must run there.
"""

import functools
import importlib
import pathlib
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tpukern import emulated_attention
from tpukern.errors import DeviceError

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


def index_reduce(native: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """torch_tpu's, but for the calls on which it ends the process."""
    if self.dim() > 1:
        raise DeviceError(
            "aten::index_reduce",
            f"a tensor of {self.dim()} dimensions, on which torch_tpu 0.2.0 ends the process",
            "one dimension",
            "Use torch.scatter_reduce with the index expanded to the source's shape.",
        )
    return native(self, *args, **kwargs)


def to_copy(native: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    """torch_tpu's; it waits where it would copy into pinned host memory, which XLA:CPU's client has not."""
    device = kwargs.get("device")
    if device is not None and device.type == "cpu":
        kwargs |= {"non_blocking": False, "pin_memory": None}
    return native(self, **kwargs)


def pin_memory(self: Any, device: Any = None) -> Any:
    """A copy in ordinary memory."""
    return self.clone()


# ATen op to what runs instead, on PrivateUse1.
REPLACEMENTS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "_scaled_dot_product_cudnn_attention": emulated_attention.forward,
        "_scaled_dot_product_cudnn_attention_backward": emulated_attention.backward,
        "_grouped_mm": grouped_mm,
    }
)
# ATen overload to a function that may call torch_tpu's kernel, its first argument, on PrivateUse1.
AROUND: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "index_reduce.out": index_reduce,
        "_to_copy": to_copy,
        "_scaled_dot_product_fused_attention_overrideable": emulated_attention.fused,
        "_scaled_dot_product_fused_attention_overrideable_backward": emulated_attention.fused_backward,
    }
)


@functools.cache
def install() -> Any:
    """Puts all of these in torch_tpu's place, for the rest of the process."""
    torch = importlib.import_module("torch")
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        for name, function in REPLACEMENTS.items():
            library.impl(name, function, "PrivateUse1", allow_override=True)
        for name, function in AROUND.items():
            native = torch.library.get_kernel(f"aten::{name}", "PrivateUse1")
            library.impl(name, _around(function, native), "PrivateUse1", with_keyset=True, allow_override=True)
        library.impl("_pin_memory", pin_memory, "CPU")
    return library


def _around(function: Callable[..., Any], native: Any) -> Callable[..., Any]:
    def around(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return function(functools.partial(native.call_boxed, keyset), *args, **kwargs)

    return around
