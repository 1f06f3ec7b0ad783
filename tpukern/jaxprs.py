"""Rewriting of traced programs, down into kernel bodies."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import jax
from jax.extend import core

from tpukern import jax_adapter

jax_adapter.load()

# Calls whose own rules would take the place of the rewritten body: they become plain calls of it.
_INLINED: Final = ("custom_jvp_call", "custom_vjp_call")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where an equation stands.

    Attributes:
        kernel: Name of the `pallas_call` around it; None outside of all.
        call: How many `pallas_call`s were entered before, counting from 0 in program order; -1 outside of all.
    """

    kernel: str | None = None
    call: int = -1


Eqn = Any  # jax.extend.core.JaxprEqn, which JAX's annotations give no shapes to
Rule = Callable[[Eqn, Place], Eqn | None]


def rewrite(closed: core.ClosedJaxpr, rule: Rule) -> core.ClosedJaxpr:
    """Rewrites every equation of a traced program: those of kernels, conditionals, loops and calls too.

    Args:
        closed: The program.
        rule: Gets an equation, whose own jaxprs are rewritten already, and its place; returns the equation to put there, of
            the same operands and results, or None to keep it. Effects that it adds are carried up.

    Returns:
        The program. Custom derivatives are gone from it: what is to be differentiated has to be differentiated before.
    """
    return _Rewriter(rule).closed(closed, Place())


class _Rewriter:
    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.calls = 0

    def closed(self, closed: core.ClosedJaxpr, place: Place) -> core.ClosedJaxpr:
        return core.ClosedJaxpr(self.open(closed.jaxpr, place), closed.consts)

    def open(self, jaxpr: Any, place: Place) -> Any:
        eqns = [self.equation(eqn, place) for eqn in jaxpr.eqns]
        new = set().union(*(e.effects - old.effects for e, old in zip(eqns, jaxpr.eqns, strict=True)))
        return jaxpr.replace(eqns=eqns, effects=jaxpr.effects | new)

    def equation(self, eqn: Eqn, place: Place) -> Eqn:
        params, added = dict(eqn.params), set()
        inner = place
        if eqn.primitive.name == "pallas_call":
            inner = Place(kernel=kernel_name(eqn), call=self.calls)
            self.calls += 1
        for name, value in eqn.params.items():
            if name in ("grid_mapping", "jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd"):
                continue
            params[name] = self.parameter(value, inner)
            added |= _effects(params[name]) - _effects(value)
        # A kernel's own memory effects end at its call.
        changed = eqn.replace(params=params, effects=eqn.effects | (set() if inner is not place else added))
        if eqn.primitive.name in _INLINED:
            changed = calling(core.jaxpr_as_fun(params["call_jaxpr"]), changed)
        return self.rule(changed, inner) or changed

    def parameter(self, value: Any, place: Place) -> Any:
        if isinstance(value, core.ClosedJaxpr):
            return self.closed(value, place)
        if isinstance(value, core.Jaxpr):
            return self.open(value, place)
        if type(value) in (tuple, list) and any(isinstance(v, core.ClosedJaxpr | core.Jaxpr) for v in value):
            return type(value)(self.parameter(v, place) for v in value)
        return value


def _effects(value: Any) -> set[Any]:
    if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
        return set(value.effects)
    if type(value) in (tuple, list):
        return set().union(*(_effects(v) for v in value))
    return set()


def calling(function: Callable[..., Any], eqn: Eqn) -> Eqn:
    """Returns an equation that calls `function` on the operands of `eqn`, for its results.

    Args:
        function: Takes the operands; returns one array, or a sequence of them if the primitive has several results.
        eqn: The equation to take the place of.

    Raises:
        TypeError: The function's results have other shapes or dtypes.
    """
    avals = [v.aval for v in eqn.invars]
    traced = jax.make_jaxpr(jax.jit(function))(*avals)
    (call,) = traced.jaxpr.eqns
    if call.invars != traced.jaxpr.invars or traced.consts:
        raise TypeError(f"the substitute of {eqn.primitive.name} does not take its operands as they are")
    got, want = ([(v.aval.shape, v.aval.dtype) for v in e.outvars] for e in (call, eqn))
    if got != want:
        raise TypeError(f"the substitute of {eqn.primitive.name} gives {got}; expected {want}")
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def kernel_name(eqn: Eqn) -> str:
    """Returns the name of a `pallas_call` equation: the one it was given, or else its function's."""
    return str(eqn.params.get("name") or eqn.params["jaxpr"].debug_info.func_name or "kernel")


def inside(eqn: Eqn) -> list[Any]:
    """Returns the jaxprs that an equation holds."""
    found = []
    for value in eqn.params.values():
        for inner in value if type(value) in (tuple, list) else (value,):
            if isinstance(inner, core.ClosedJaxpr | core.Jaxpr):
                found.append(inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner)
    return found


def equations(jaxpr: Any) -> list[Eqn]:
    """Returns every equation of a jaxpr and of those inside it: an equation before what it holds."""
    found = []
    for eqn in jaxpr.eqns:
        found.append(eqn)
        for inner in inside(eqn):
            found += equations(inner)
    return found
