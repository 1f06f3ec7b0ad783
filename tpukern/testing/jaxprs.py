"""Traced programs and their rewriting (`tpukern.jaxprs`), and how a rewritten one is evaluated as the function it was."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from tpukern.jaxprs import Eqn, Place, Rule, calling, equations, inside, kernel_name, rewrite

__all__ = [
    "Eqn",
    "Place",
    "Rule",
    "calling",
    "equations",
    "evaluate",
    "inside",
    "kernel_name",
    "rewrite",
    "traced",
]


def traced(function: Callable[..., Any] | core.ClosedJaxpr, args: Sequence[Any]) -> tuple[core.ClosedJaxpr, Any]:
    """Traces a function (a traced program is taken as it is).

    Returns:
        The program, and the tree of its results: None for a program, whose results are a tuple.
    """
    if isinstance(function, core.ClosedJaxpr):
        return function, None
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return closed, jax.tree.structure(shapes)


def evaluate(closed: core.ClosedJaxpr, tree: Any, args: Sequence[Any]) -> Any:
    """Evaluates a program on a function's arguments, and gives its results the function's shape."""
    outs = core.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
    return tuple(outs) if tree is None else jax.tree.unflatten(tree, outs)
