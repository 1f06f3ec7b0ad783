"""Kernels as torch ops: schema from the declaration, kernels for the tpu device and the CPU, shapes, autograd, autocast.

The op returns every output, those `saved` for the backward pass included; these are not differentiable. Autograd is bound to
the op itself, so a forward pass that ran as our op is followed by our backward pass and no other.
"""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from tpukern import tagging
from tpukern.errors import OverrideError
from tpukern.launching import CALLER, launcher

if TYPE_CHECKING:
    from tpukern.dsl import Kernel

SCHEMA_TYPES: Final = {bool: "bool", int: "int", float: "float", str: "str"}
PYTHON_TYPES: Final = {"bool": bool, "int": int, "float": int | float, "str": str}  # what the schema's types take
AUTOCAST_KEYS: Final = {"cpu": "AutocastCPU", "tpu": "AutocastPrivateUse1"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchOp:
    """A kernel that torch knows.

    Attributes:
        kernel: The kernel.
        overload: What torch calls: `torch.ops.ns.name.default`.
        statics: The static arguments that are in its schema.
        shown: Places of the outputs that a caller of the kernel gets: those not saved for the backward pass.
        library: Keeps the registration alive.
    """

    kernel: "Kernel"
    overload: Any
    statics: tuple[str, ...]
    shown: tuple[int, ...]
    library: torch.library.Library


def define(kernel: "Kernel", op: str) -> TorchOp:
    """Registers a kernel as the torch op `op`.

    Raises:
        OverrideError: `op` is no name of an op, or another library has an op of that name.
    """
    namespace, _, name = op.partition("::")
    if not (namespace.isidentifier() and name.isidentifier()):
        raise OverrideError(kernel.name, f"op {op!r}", "namespace::name")
    if namespace in ("aten", "prims", "tpu"):
        raise OverrideError(
            kernel.name, f"op {op!r} is in a namespace of PyTorch's", "one of your own", "Use Override for ATen ops."
        )
    statics = _statics(kernel)
    library = torch.library.Library(namespace, "FRAGMENT")
    try:
        library.define(f"{name}{_schema(kernel, statics)}", tags=(torch.Tag.pt2_compliant_tag,))
    except RuntimeError as error:
        library._destroy()
        raise OverrideError(kernel.name, f"op {op!r} cannot be defined: {_first_line(error)}", "a name that is free") from error
    overload = getattr(getattr(torch.ops, namespace), name).default
    library.impl(name, _implementation(kernel, op, on_cpu=False), "PrivateUse1")
    library.impl(name, _implementation(kernel, op, on_cpu=True), "CPU")
    torch.library.register_fake(op, _fake(kernel), lib=library)
    torch.library.register_autograd(op, _backward(kernel), setup_context=_setup(kernel), lib=library)
    for device_type, key in AUTOCAST_KEYS.items():
        library.impl(name, _autocast(kernel, overload, device_type), key, with_keyset=True)
    saved = {o.name for o in kernel.declaration.outputs if getattr(o.role, "saved", False)}
    shown = tuple(at for at, o in enumerate(kernel.declaration.outputs) if o.name not in saved)
    return TorchOp(kernel=kernel, overload=overload, statics=tuple(statics), shown=shown, library=library)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


# --- schema ----------------------------------------------------------------------------------------------------------


def _statics(kernel: "Kernel") -> dict[str, str]:
    """Returns the schema type of each static argument that can be an argument of a torch op."""
    found = {name: _schema_type(_annotation(kernel, name), value) for name, value in kernel.declaration.statics.items()}
    return {name: kind for name, kind in found.items() if kind is not None}


def _annotation(kernel: "Kernel", name: str) -> Any:
    """Returns the annotation of a static argument; a backward pass may leave it to its forward kernel."""
    for k in (kernel, kernel.forward):
        note = getattr(k.fn, "__annotations__", {}).get(name) if k is not None else None
        if isinstance(note, str):
            try:
                note = eval(note, getattr(k.fn, "__globals__", {}))  # type: ignore[union-attr]
            except (NameError, TypeError, AttributeError, SyntaxError):
                note = None
        if note is not None:
            return note
    return None


def _schema_type(annotation: Any, default: Any) -> str | None:
    parts = typing.get_args(annotation) if typing.get_origin(annotation) in (typing.Union, types.UnionType) else (annotation,)
    optional = type(None) in parts or default is None
    kinds = {type(v) for p in parts if typing.get_origin(p) is typing.Literal for v in typing.get_args(p)}
    kinds |= {p for p in parts if isinstance(p, type)} - {type(None)}
    if not kinds & set(SCHEMA_TYPES) and default is not None and default is not inspect.Parameter.empty:
        kinds = {type(default)}
    if kinds == {int, float}:
        kinds = {float}
    if len(kinds) != 1 or (kind := SCHEMA_TYPES.get(kinds.pop())) is None:
        return None
    return f"{kind}?" if optional else kind


def _schema(kernel: "Kernel", statics: Mapping[str, str]) -> str:
    k = kernel.declaration
    keywords = [f"{kind} {name}{_default(k.statics[name])}" for name, kind in statics.items()]
    arguments = ", ".join([*(f"Tensor {o.name}" for o in k.inputs), "*", *keywords, "str config=''"])
    returns = ", ".join("Tensor" for _ in k.outputs)
    return f"({arguments}) -> {returns if len(k.outputs) == 1 else f'({returns})'}"


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    if isinstance(value, str):
        return "='" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return f"={value!r}"


# --- kernels ---------------------------------------------------------------------------------------------------------


def _implementation(kernel: "Kernel", op: str, *, on_cpu: bool) -> Callable[..., Any]:
    launch = launcher(kernel, on_cpu=on_cpu).launch

    def run(*tensors: torch.Tensor, **keywords: Any) -> Any:
        outer, CALLER.op = CALLER.op, op
        try:
            return launch(tensors, keywords)
        finally:
            CALLER.op = outer

    return run


def _fake(kernel: "Kernel") -> Callable[..., Any]:
    def shapes(*tensors: torch.Tensor, config: str = "", **statics: Any) -> Any:
        """Sizes may be symbols: binding them adds the guards that equal dims need, and no more."""
        tagging.ensure()
        signature = kernel.signature(*tensors, **statics)
        outputs = [tensors[0].new_empty(o.shape, dtype=getattr(torch, o.dtype)) for o in signature.outputs]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return shapes


def _autocast(kernel: "Kernel", overload: Any, device_type: str) -> Callable[..., Any]:
    """Casts the operands that share the call's element type to autocast's, as for any op whose sums are kept in float32."""
    free = [o.role.dtype is None for o in kernel.declaration.inputs]
    below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, AUTOCAST_KEYS[device_type]))

    def cast(keyset: Any, *tensors: torch.Tensor, **keywords: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        if str(dtype)[6:] in kernel.dtypes:
            tensors = tuple(
                t.to(dtype) if is_free and t.is_floating_point() else t for t, is_free in zip(tensors, free, strict=True)
            )
        with torch._C._ExcludeDispatchKeyGuard(below):
            return overload(*tensors, **keywords)

    return cast


# --- autograd --------------------------------------------------------------------------------------------------------


def _setup(kernel: "Kernel") -> Callable[..., None]:
    k = kernel.declaration
    places = {o.name: at for at, o in enumerate(k.inputs)}
    saved = [at for at, o in enumerate(k.outputs) if getattr(o.role, "saved", False)]

    def setup(ctx: Any, inputs: Sequence[torch.Tensor], keyword_only_inputs: Mapping[str, Any], output: Any) -> None:
        outputs = output if isinstance(output, tuple | list) else (output,)
        ctx.mark_non_differentiable(*(outputs[at] for at in saved))
        ctx.statics = {name: value for name, value in keyword_only_inputs.items() if name != "config"}
        gradient = kernel.gradient
        if gradient is None:
            return
        known = {name: inputs[at] for name, at in places.items()} | {o.name: t for o, t in zip(k.outputs, outputs, strict=True)}
        ctx.names = [o.name for o in gradient.declaration.inputs if o.name in known]
        ctx.save_for_backward(*(known[name] for name in ctx.names))
        ctx.given = [(o.shape, o.dtype, o.device) for o in outputs]

    return setup


def _backward(kernel: "Kernel") -> Callable[..., Any]:
    k = kernel.declaration

    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        from tpukern.calling import registered

        gradient = kernel.gradient
        if gradient is None:
            raise OverrideError(kernel.name, "it has no backward", f"one, declared with @{kernel.name}.backward")
        names = {o.name for o in gradient.declaration.outputs}
        known = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        for o, grad, (shape, dtype, place) in zip(k.outputs, grads, ctx.given, strict=True):
            known[f"d{o.name}"] = grad if grad is not None else torch.zeros(shape, dtype=dtype, device=place)
        needed = [f"d{o.name}" in names and needs for o, needs in zip(k.inputs, ctx.needs_input_grad, strict=True)]
        if not any(needed):
            return (None,) * len(needed)
        op = registered(gradient)
        statics = {name: value for name, value in ctx.statics.items() if name in op.statics}
        results = op.overload(*(known[o.name] for o in gradient.declaration.inputs), **statics)
        results = results if isinstance(results, tuple | list) else (results,)
        by_name = {o.name: r for o, r in zip(gradient.declaration.outputs, results, strict=True)}
        return tuple(by_name[f"d{o.name}"] if needs else None for o, needs in zip(k.inputs, needed, strict=True))

    return backward
