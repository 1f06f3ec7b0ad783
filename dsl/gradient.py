"""Backward passes, bound to their forward kernel by names."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from tpukern.dsl import context, dtypes
from tpukern.dsl.declaration import Declaration, Parameter, each_output
from tpukern.dsl.frozen import FrozenMapping
from tpukern.dsl.roles import Input, Output, Table
from tpukern.dsl.signature import Signature
from tpukern.errors import SignatureError, did_you_mean

if TYPE_CHECKING:
    from tpukern.dsl.kernel import Kernel


def cotangents(forward: Declaration) -> tuple[str, ...]:
    """Returns the names of the cotangents that a backward pass of `forward` has to take."""
    return tuple(f"d{o.name}" for o, role in each_output(forward) if not role.saved)


def check(forward: Declaration, backward: str, takes: tuple[str, ...], gives: tuple[str, ...]) -> None:
    """Checks that a backward pass takes and gives what its forward kernel has.

    Raises:
        SignatureError: A name is none of the forward's, or a cotangent is forgotten.
    """
    known = [*(o.name for o in (*forward.inputs, *forward.outputs)), *cotangents(forward)]
    for name in takes:
        if name not in known and name not in forward.statics:
            raise SignatureError(
                forward.kernel, f"backward {backward} wants {name!r}", f"one of {known}", did_you_mean(name, known)
            )
    for name in cotangents(forward):
        if name not in takes:
            do = f"If {name[1:]} is only kept for the backward, say Out(..., saved=True)."
            raise SignatureError(forward.kernel, f"backward {backward} ignores {name}", f"a parameter {name}", do)
    possible = [f"d{o.name}" for o in differentiable(forward)]
    for name in gives:
        if name not in possible:
            found = f"backward {backward} gives {name!r}"
            raise SignatureError(forward.kernel, found, f"one of {possible}", did_you_mean(name, possible))


def differentiable(forward: Declaration) -> tuple[Parameter, ...]:
    """Returns the inputs that a gradient may be given for."""
    return tuple(
        o for o in forward.inputs if not isinstance(o.role, Table) and not (o.role.dtype and dtypes.is_integer(o.role.dtype))
    )


def casts(forward: Declaration, gives: tuple[str, ...]) -> dict[str, str | None]:
    """Returns the element type of each gradient: that of the input it belongs to (None: the call's)."""
    types = {f"d{o.name}": o.role.dtype for o in forward.inputs}
    return {name: types[name] for name in gives}


def declaration_of(forward: Declaration, function: Callable[..., Any], gives: tuple[str, ...] | None) -> Declaration:
    """Derives the declaration of a backward pass that is a JAX function, from its parameters' names.

    Args:
        forward: The forward kernel's.
        function: Takes forward operands, outputs, cotangents and statics by name; returns a dict of gradients.
        gives: Names of the inputs that it returns a gradient for; None for all that can have one.
    """
    name = function.__name__
    takes = tuple(inspect.signature(function).parameters)
    outputs = (
        tuple(f"d{given}" for given in gives) if gives is not None else tuple(f"d{o.name}" for o in differentiable(forward))
    )
    check(forward, name, takes, outputs)
    known = {o.name: o for o in (*forward.inputs, *forward.outputs)}
    known |= {f"d{o.name}": o for o, role in each_output(forward) if not role.saved}
    statics = [wanted for wanted in takes if wanted in forward.statics]
    operands = [as_input(wanted, known[wanted]) for wanted in takes if wanted not in statics]
    operands += [as_output(given, known[given[1:]]) for given in outputs]
    return Declaration(
        kernel=name,
        operands=tuple(operands),
        dims=FrozenMapping(),
        choices=FrozenMapping(),
        statics=FrozenMapping({name: forward.statics[name] for name in statics}),
        static_types=FrozenMapping({name: forward.static_types[name] for name in statics}),
        grid=(),
        dtypes=forward.dtypes,
        tile=False,
    )


def as_input(name: str, o: Parameter) -> Parameter:
    """Returns an operand of the forward pass as an input of the backward pass."""
    role = Input(o.role.dims, o.role.dtype, 0) if isinstance(o.role, Input | Output) else o.role
    return dataclasses.replace(o, name=name, role=role)


def as_output(name: str, o: Parameter) -> Parameter:
    """Returns an operand of the forward pass as a result of the backward pass, of the same shape."""
    return dataclasses.replace(o, name=name, role=Output(o.role.dims, o.role.dtype, None, None, False))


def run_function(function: Callable[..., Any], signature: Signature, *arrays: Any) -> tuple[Any, ...]:
    """Calls a backward pass that is a JAX function, and returns its gradients in declared order, cast and checked.

    Raises:
        SignatureError: It does not return the gradients it has to.
    """
    named = {o.name: array for o, array in zip(signature.inputs, arrays, strict=True)}
    return gradients(signature, function(**named, **signature.statics))


def gradients(signature: Signature, result: Any) -> tuple[Any, ...]:
    """Returns what a backward pass gave by name in declared order, cast and checked.

    Raises:
        SignatureError: It does not return the gradients it has to.
    """
    wanted = [o.name for o in signature.outputs]
    if not isinstance(result, Mapping) or sorted(result) != sorted(wanted):
        got = f"a dict of {sorted(result)}" if isinstance(result, Mapping) else f"a {type(result).__name__}"
        do = "Inputs without a gradient are left out by @<kernel>.backward(gives=(...))."
        raise SignatureError(signature.kernel, f"the function returned {got}", f"a dict of {wanted}", do)
    for o in signature.outputs:
        if tuple(result[o.name].shape) != o.shape:
            found = f"{o.name} has shape {tuple(result[o.name].shape)}"
            raise SignatureError(signature.kernel, found, f"{o.shape}, the shape of {o.name[1:]}")
    return tuple(result[o.name].astype(o.dtype) for o in signature.outputs)


def operands(kernel: "Kernel", forward: Signature, arrays: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Picks a backward kernel's arguments by name.

    Args:
        kernel: The backward kernel.
        forward: The forward call's signature.
        arrays: Forward operands, outputs and cotangents (`d<out>`).

    Returns:
        Its arrays in order and its static arguments.
    """
    statics = {name: value for name, value in forward.statics.items() if name in kernel.declaration.statics}
    return [arrays[o.name] for o in kernel.declaration.inputs], statics


def with_gradient(kernel: "Kernel", signature: Signature, run: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., Any]:
    """Returns `run` with the kernel's backward pass as its derivative.

    The context in force now is the one that the backward pass will run under.
    """
    gradient = kernel.gradient
    assert gradient is not None
    at_call = context.current()
    differentiated = jax.custom_vjp(run)

    def forward(*arrays: Any) -> tuple[Any, Any]:
        outputs = run(*arrays)
        return outputs, (arrays, outputs)

    def backward(kept: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        arrays, outputs = kept
        named = {o.name: array for o, array in zip(signature.inputs, arrays, strict=True)}
        named |= {o.name: array for o, array in zip(signature.outputs, outputs, strict=True)}
        named |= {f"d{o.name}": array for o, array in zip(signature.outputs, given, strict=True)}
        wanted, statics = operands(gradient, signature, named)
        with context.entered(at_call):
            results = gradient.run(*wanted, **statics)
        by_name = dict(zip((o.name for o in gradient.declaration.outputs), results, strict=True))
        return tuple(by_name.get(f"d{o.name}") for o in signature.inputs)

    differentiated.defvjp(forward, backward)
    return differentiated
