"""From a kernel to its torch op, and to its launch: what `Kernel.__call__` and `Kernel.launch` do with torch tensors."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from tpukern import tagging, torch_ops
from tpukern.dsl import declared
from tpukern.errors import ConfigError, OverrideError, SignatureError
from tpukern.launching import Layouts, launcher
from tpukern.registry import REGISTRY
from tpukern.torch_ops import TorchOp

if TYPE_CHECKING:
    from tpukern.dsl import Kernel


def op_of(kernel: "Kernel") -> str | None:
    """Returns the name of a kernel's torch op; a backward pass without one takes its forward kernel's, `_backward` added."""
    if kernel.op is not None or kernel.forward is None or kernel.forward.op is None:
        return kernel.op
    return f"{kernel.forward.op}_backward"


def registered(kernel: "Kernel") -> TorchOp:
    """Returns a kernel as torch knows it, registering it first if need be.

    Raises:
        OverrideError: It has no op, or another kernel has that op.
    """
    op = op_of(kernel)
    if op is None:
        raise OverrideError(
            kernel.name, "the kernel has no torch op", "one for tensors of torch", 'Declare it: @kernel(op="my::name").'
        )
    known = REGISTRY.ops.get(op)
    if known is not None and known.kernel is kernel:
        return known
    if known is not None:
        _check_newer(known.kernel, kernel, op)
        known.library._destroy()
        known.kernel.torch_op = known.kernel.torch_call = None
    kernel.torch_op = REGISTRY.ops[op] = torch_ops.define(kernel, op)
    kernel.torch_call = call
    return kernel.torch_op


def _check_newer(old: "Kernel", new: "Kernel", op: str) -> None:
    """Checks that a kernel is a newer version of the one whose op it takes, as in a notebook."""
    if (old.fn.__module__, old.fn.__qualname__) != (new.fn.__module__, new.fn.__qualname__):
        found = f"op {op!r} is that of kernel {old.name} in {old.fn.__module__}"
        raise OverrideError(new.name, found, "one kernel for each op", "Give one of them another op.")


def _declared(kernel: "Kernel") -> None:
    for k in (kernel, kernel.gradient):
        op = op_of(k) if k is not None else None
        if k is not None and op is not None:
            registered(k)
            tagging.forget(op)
    if REGISTRY.tag is not None:
        tagging.tag()


def call(kernel: "Kernel", args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Calls a kernel's torch op.

    Args:
        kernel: The kernel.
        args: Tensors, in the order of its inputs; Python numbers for `Scalar`s.
        keywords: Static arguments, config keys, and `config`, the text of a config.

    Returns:
        The output; several as a tuple. Those saved for the backward pass are left out.

    Raises:
        SignatureError: Rank, size, dtype or device do not fit.
        ConfigError: A keyword is unknown or of another type, or a config not legal.
        OverrideError: The kernel has no torch op, or is to be differentiated in forward mode.
    """
    op: TorchOp = kernel.torch_op or registered(kernel)
    if keywords:
        keywords = _arguments(kernel, op, keywords)
    if len(args) != len(kernel.declaration.inputs) or not all(isinstance(arg, torch.Tensor) for arg in args):
        args = _tensors(kernel, args)
    if forward_ad._current_level >= 0:
        _check_tangents(kernel, args)
    try:
        results = op.overload(*args, **keywords)
    except RuntimeError:
        _check_types(kernel, op, keywords)
        raise
    if len(op.shown) == len(kernel.declaration.outputs):
        return results
    shown = tuple(results[at] for at in op.shown)
    return shown[0] if len(shown) == 1 else shown


def _arguments(kernel: "Kernel", op: TorchOp, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Sorts keywords into the schema's: static arguments, and the text of all config keys."""
    given: dict[str, Any] = {}
    config = [str(keywords["config"])] if keywords.get("config") else []
    for name, value in keywords.items():
        if name in op.statics:
            given[name] = value
        elif name in kernel.declaration.statics:
            if value != kernel.declaration.statics[name]:
                found = f"static argument {name} = {value!r} cannot be an argument of a torch op"
                raise ConfigError(kernel.name, found, "a bool, int, float or str", "Call the kernel on jax arrays, or fix it.")
        elif name != "config":
            config.append(f"{name}={value}")
    return {**given, "config": ",".join(config)} if config else given


def _check_types(kernel: "Kernel", op: TorchOp, keywords: Mapping[str, Any]) -> None:
    """Raises ConfigError if a static argument is not of its type; torch's own words are seven lines."""
    for argument in op.overload._schema.arguments:
        value, kind = keywords.get(argument.name), str(argument.type)
        wanted = torch_ops.PYTHON_TYPES.get(kind.removeprefix("Optional[").removesuffix("]"))
        optional = value is None and (kind.startswith("Optional") or argument.name not in keywords)
        if wanted is not None and not optional and not isinstance(value, wanted):
            found = f"{argument.name} = {value!r} is a {type(value).__name__}"
            raise ConfigError(kernel.name, found, kind.replace("Optional[", "None or a ").removesuffix("]"))


def _check_tangents(kernel: "Kernel", args: Sequence[Any]) -> None:
    """Raises OverrideError for forward-mode derivatives: torch would run the op without a word, and drop them."""
    for o, arg in zip(kernel.declaration.inputs, args, strict=True):
        if forward_ad.unpack_dual(arg).tangent is not None:
            found = f"{o.name} has a tangent, of forward-mode differentiation (torch.func.jvp, dual_level)"
            raise OverrideError(kernel.name, found, "reverse mode, the one that kernels have", "Use torch.autograd.grad.")


def _tensors(kernel: "Kernel", args: Sequence[Any]) -> list[Any]:
    inputs = kernel.declaration.inputs
    if len(args) != len(inputs):
        raise SignatureError(kernel.name, f"{len(args)} arrays", f"{len(inputs)}: {', '.join(map(str, inputs))}")
    place = next(arg.device for arg in args if isinstance(arg, torch.Tensor))
    found = []
    for o, arg in zip(inputs, args, strict=True):
        if isinstance(arg, int | float) and not o.role.dims:
            arg = torch.tensor(arg, dtype=getattr(torch, str(o.role.dtype)), device=place)
        if not isinstance(arg, torch.Tensor):
            raise SignatureError(kernel.name, f"{o.name} is a {type(arg).__name__}", "a tensor")
        found.append(arg)
    return found


def launch(kernel: "Kernel", tensors: Sequence[Any], keywords: Mapping[str, Any], layouts: Layouts | None = None) -> Any:
    """Runs a kernel on tensors without autograd: see `Kernel.launch`."""
    kernel.torch_launch = launcher(kernel).launch
    return kernel.torch_launch(tensors, keywords, layouts)


declared.listen(_declared)
