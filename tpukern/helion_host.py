"""The host part of a Helion kernel, run on JAX arrays: what its function does outside of its tile loops.

Helion leaves that part as plain PyTorch: sizes, views, empty outputs, a last sum over partial results. Here the tensors are
`HostTensor`s, which hold a JAX array, and each ATen operation on them is the JAX one. Nothing is computed while it runs under
a JAX trace: it becomes part of the traced function.

Imports torch: only `helion_adapter` imports this module, when a Helion kernel is used.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_CPU: Final = torch.device("cpu")


class Unsupported(Exception):
    """An operation outside of the tile loops that is none of those below."""


def jax_dtype(dtype: torch.dtype) -> Any:
    return jnp.dtype(str(dtype).removeprefix("torch.").replace("bool", "bool_"))


def torch_dtype(dtype: Any) -> torch.dtype:
    found: torch.dtype = getattr(torch, str(jnp.dtype(dtype)))
    return found


class HostTensor(torch.Tensor):
    """A tensor whose values are a JAX array.

    Attributes:
        array: The values now: operations in place replace it.
        hand_back: For a view, writes new values of it to what it is a view of.
    """

    array: Any
    hand_back: Callable[[Any], None] | None

    @staticmethod
    def __new__(cls, array: Any, hand_back: Callable[[Any], None] | None = None) -> "HostTensor":
        shape, dtype = tuple(array.shape), torch_dtype(array.dtype)
        made: HostTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=_CPU)
        made.array, made.hand_back = array, hand_back
        return made

    def write(self, array: Any) -> None:
        """Replaces the values, of this tensor and of those that it is a view of."""
        self.array = jnp.broadcast_to(jnp.asarray(array, self.array.dtype), self.array.shape)
        if self.hand_back is not None:
            self.hand_back(self.array)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


class HostMode(TorchDispatchMode):
    """While it is entered, tensors that are made from nothing are `HostTensor`s too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.removeprefix("aten::")
    made = _FACTORIES.get(name)
    if made is not None:
        return HostTensor(made(*args, **kwargs))
    given = [a for group in (args, kwargs.values()) for a in _flat(group)]
    if not any(isinstance(a, HostTensor) for a in given):
        return func(*args, **kwargs)  # constants
    if name in _VIEWS:
        return _view(args[0], *_VIEWS[name](args[0], *args[1:], **kwargs))
    if name in _IN_PLACE:
        args[0].write(_IN_PLACE[name](*map(array_of, args), **kwargs))
        return args[0]
    operation = _OPERATIONS.get(name)
    if operation is None:
        raise Unsupported(f"aten::{name}")
    dtype = None if kwargs.get("dtype") is None else jax_dtype(kwargs["dtype"])
    first, *rest = (_arrays(a) for a in args)
    if dtype is not None and name in ("sum", "mean", "cumsum"):
        first = first.astype(dtype)
    result = operation(first, *rest, **{k: _arrays(v) for k, v in kwargs.items() if k not in _IGNORED})
    return HostTensor(result if dtype is None else result.astype(dtype))


_IGNORED: Final = ("dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking", "requires_grad")


def _flat(values: Any) -> list[Any]:
    return [a for v in values for a in (_flat(v) if isinstance(v, tuple | list) else (v,))]


def array_of(value: Any) -> Any:
    """Returns a tensor's values as a JAX array; what is no tensor stays as it is."""
    if isinstance(value, HostTensor):
        return value.array
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        return jnp.asarray(plain.float().numpy() if plain.dtype == torch.bfloat16 else plain.numpy(), jax_dtype(plain.dtype))
    return value


def _arrays(value: Any) -> Any:
    return [array_of(v) for v in value] if isinstance(value, tuple | list) else array_of(value)


# --- tensors made from nothing ---------------------------------------------------------------------------------------


def _filled(shape: Sequence[int], value: Any, dtype: torch.dtype | None, like: Any = None) -> Any:
    wanted = jax_dtype(dtype) if dtype is not None else like.array.dtype if like is not None else jax_dtype(_default(value))
    return jnp.full([int(n) for n in shape], value, wanted)


def _default(value: Any) -> torch.dtype:
    return torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.get_default_dtype()


def _arange(start: Any, end: Any = None, step: Any = 1, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return jnp.arange(0 if end is None else start, start if end is None else end, step, jax_dtype(dtype or _default(start)))


_FACTORIES: Final[dict[str, Callable[..., Any]]] = {
    "empty": lambda size, *, dtype=None, **_: _filled(size, 0.0, dtype),
    "empty_strided": lambda size, stride, *, dtype=None, **_: _filled(size, 0.0, dtype),
    "zeros": lambda size, *, dtype=None, **_: _filled(size, 0.0, dtype),
    "ones": lambda size, *, dtype=None, **_: _filled(size, 1.0, dtype),
    "full": lambda size, value, *, dtype=None, **_: _filled(size, value, dtype),
    "arange": _arange,
    "empty_like": lambda x, *, dtype=None, **_: _filled(x.shape, 0.0, dtype or x.dtype),
    "zeros_like": lambda x, *, dtype=None, **_: _filled(x.shape, 0.0, dtype or x.dtype),
    "ones_like": lambda x, *, dtype=None, **_: _filled(x.shape, 1.0, dtype or x.dtype),
    "full_like": lambda x, value, *, dtype=None, **_: _filled(x.shape, value, dtype or x.dtype),
    "new_empty": lambda x, size, *, dtype=None, **_: _filled(size, 0.0, dtype or x.dtype),
    "new_empty_strided": lambda x, size, stride, *, dtype=None, **_: _filled(size, 0.0, dtype or x.dtype),
    "new_zeros": lambda x, size, *, dtype=None, **_: _filled(size, 0.0, dtype or x.dtype),
    "new_ones": lambda x, size, *, dtype=None, **_: _filled(size, 1.0, dtype or x.dtype),
    "new_full": lambda x, size, value, *, dtype=None, **_: _filled(size, value, dtype or x.dtype),
}


# --- views: what they show, and how what is written to them gets back -------------------------------------------------

Shown = tuple[Any, Callable[[Any], Any]]  # the view's values, and from its new values to those of what it is a view of


def _view(base: HostTensor, shown: Any, back: Callable[[Any], Any]) -> HostTensor:
    return HostTensor(shown, lambda values: base.write(back(values)))


def _reshaped(x: HostTensor, shape: Sequence[int]) -> Shown:
    before = x.array.shape
    return jnp.reshape(x.array, [int(n) for n in shape]), lambda values: jnp.reshape(values, before)


def _permuted(x: HostTensor, order: Sequence[int]) -> Shown:
    order = [axis % x.dim() for axis in order]
    back = sorted(range(len(order)), key=order.__getitem__)
    return jnp.transpose(x.array, order), lambda values: jnp.transpose(values, back)


def _swapped(x: HostTensor, a: int, b: int) -> Shown:
    order = list(range(x.dim()))
    order[a % x.dim()], order[b % x.dim()] = order[b % x.dim()], order[a % x.dim()]
    return _permuted(x, order)


def _squeezed(x: HostTensor, dims: Any = None) -> Shown:
    wanted = range(x.dim()) if dims is None else [d % x.dim() for d in ([dims] if isinstance(dims, int) else dims)]
    return _reshaped(x, [n for axis, n in enumerate(x.shape) if not (axis in wanted and n == 1)])


def _unsqueezed(x: HostTensor, dim: int) -> Shown:
    shape = list(x.shape)
    shape.insert(dim % (x.dim() + 1), 1)
    return _reshaped(x, shape)


def _indexed(x: HostTensor, index: tuple[Any, ...]) -> Shown:
    return x.array[index], lambda values: x.array.at[index].set(values)


def _sliced(x: HostTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Shown:
    return _indexed(x, (*(slice(None),) * (dim % x.dim()), slice(start, end, step)))


def _selected(x: HostTensor, dim: int, index: int) -> Shown:
    return _indexed(x, (*(slice(None),) * (dim % x.dim()), index))


def _expanded(x: HostTensor, shape: Sequence[int], **_: Any) -> Shown:
    before = x.array
    padded = (1,) * (len(shape) - before.ndim) + before.shape
    wide = jnp.broadcast_to(before.reshape(padded), [n if w < 0 else w for n, w in zip(padded, shape, strict=True)])

    def refuse(values: Any) -> Any:
        raise Unsupported("a write to an expanded tensor")

    return wide, refuse


_VIEWS: Final[dict[str, Callable[..., Shown]]] = {
    "view": _reshaped,
    "_unsafe_view": _reshaped,
    "_reshape_alias": lambda x, shape, *_: _reshaped(x, shape),
    "permute": _permuted,
    "transpose": _swapped,
    "t": lambda x: _swapped(x, 0, 1) if x.dim() > 1 else _reshaped(x, x.shape),
    "squeeze": _squeezed,
    "unsqueeze": _unsqueezed,
    "slice": _sliced,
    "select": _selected,
    "expand": _expanded,
    "detach": lambda x: _reshaped(x, x.shape),
    "alias": lambda x: _reshaped(x, x.shape),
    "lift_fresh": lambda x: _reshaped(x, x.shape),
}


# --- the rest --------------------------------------------------------------------------------------------------------


def _copied(x: Any, **_: Any) -> Any:
    return x


def _axes(dim: Any) -> Any:
    return None if dim is None or dim == [] else tuple(dim) if isinstance(dim, list | tuple) else dim


def _float(x: Any) -> Any:
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


def _sum(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Adds in float32 what is stored in less."""
    wide = x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x
    return jnp.sum(wide, _axes(dim), keepdims=keepdim).astype(x.dtype)


def _mean(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    count = x.size // max(1, math.prod(jnp.sum(x, _axes(dim), keepdims=True).shape))
    wide = jnp.sum(x.astype(jnp.float32), _axes(dim), keepdims=keepdim) / max(1, count)
    return wide.astype(_float(x).dtype)


def _padded(x: Any, widths: Sequence[int], value: Any = 0) -> Any:
    pairs = [(0, 0)] * x.ndim
    for n in range(len(widths) // 2):
        pairs[x.ndim - 1 - n] = (int(widths[2 * n]), int(widths[2 * n + 1]))
    return jnp.pad(x, pairs, constant_values=value)


def _typed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an operation of two operands whose result has torch's type: a Python number does not widen an array."""

    def run(a: Any, b: Any, *, alpha: Any = 1, **_: Any) -> Any:
        return function(a, b * alpha if alpha != 1 else b)

    return run


_OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    "clone": _copied,
    "contiguous": _copied,
    "_to_copy": _copied,
    "sum": _sum,
    "mean": _mean,
    "amax": lambda x, dim=None, keepdim=False: jnp.max(x, _axes(dim), keepdims=keepdim),
    "amin": lambda x, dim=None, keepdim=False: jnp.min(x, _axes(dim), keepdims=keepdim),
    "cumsum": lambda x, dim: jnp.cumsum(x, dim),
    "add": _typed(jnp.add),
    "sub": _typed(jnp.subtract),
    "rsub": _typed(lambda a, b: b - a),
    "mul": _typed(jnp.multiply),
    "div": lambda a, b: jnp.divide(_float(a), b),
    "neg": jnp.negative,
    "abs": jnp.abs,
    "exp": lambda x: jnp.exp(_float(x)),
    "log": lambda x: jnp.log(_float(x)),
    "sqrt": lambda x: jnp.sqrt(_float(x)),
    "rsqrt": lambda x: jax.lax.rsqrt(_float(x)),
    "reciprocal": lambda x: 1 / _float(x),
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "where": jnp.where,
    "cat": lambda parts, dim=0: jnp.concatenate(parts, dim),
    "constant_pad_nd": _padded,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}

_IN_PLACE: Final[dict[str, Callable[..., Any]]] = {
    "copy_": lambda x, source, *_, **__: source,
    "zero_": lambda x: 0,
    "fill_": lambda x, value: value,
    "add_": lambda x, y, *, alpha=1: x + y * alpha,
    "sub_": lambda x, y, *, alpha=1: x - y * alpha,
    "mul_": lambda x, y: x * y,
    "div_": lambda x, y: x / y,
}
