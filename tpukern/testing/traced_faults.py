"""Faults as changes of the traced program: of grids, block specs, tails, precisions, aliases and of the order that is claimed.

What the declaration decides stands nowhere in the source as such; it stands in the `pallas_call`s.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend import core

from tpukern.dsl import Kernel
from tpukern.testing import jaxprs, programs, strategies
from tpukern.testing.faults import Fault

_WRITES: Final = ("swap",)
_GIVEN_NO_PRECISION: Final = "precision unstated"


def traced_faults(kernel: Kernel) -> list[Fault]:
    """Returns the faults that the `pallas_call`s of a kernel and of its gradient have room for.

    A kernel that has a reference of its own is judged by itself.
    """
    others = {call.name for call in _called(kernel) if call.reference is not None and call is not kernel}
    seen: dict[str, str] = {}
    found: list[Fault] = []
    for direction in kernel.directions:
        for point in strategies.rich(kernel, 0):
            plan = programs.plan(kernel, point, gradient=direction == "backward")
            closed = jax.make_jaxpr(plan.function())(*plan.specs)
            for eqn in jaxprs.equations(closed.jaxpr):
                if eqn.primitive.name != "pallas_call":
                    continue
                name = jaxprs.kernel_name(eqn)
                if seen.setdefault(name, direction) == direction and name not in others:
                    found += _of_call(eqn, name, direction)
    return list(dict.fromkeys(found))


def _called(kernel: Kernel) -> list[Kernel]:
    found = []
    for point in strategies.rich(kernel, 0):
        signature = point.signature(kernel)
        found += [call.kernel for call in kernel.calls((signature,))]
        if kernel.gradient is not None:
            found += [call.kernel for call in kernel.gradient.calls((kernel.gradient_signature(signature),))]
    return found


def _of_call(eqn: Any, name: str, direction: str) -> Iterator[Fault]:
    def fault(kind: str, what: str, *at: int) -> Fault:
        return Fault(kind=kind, where=name, direction=direction, what=what, at=at)

    mapping = eqn.params["grid_mapping"]
    rank = len(mapping.grid)
    for n, block in enumerate(mapping.block_mappings):
        operand = f"operand {n}" if n < mapping.num_inputs else f"output {n - mapping.num_inputs}"
        walked = [a for a, v in enumerate(block.index_map_jaxpr.jaxpr.outvars) if not isinstance(v, core.Literal)]
        for axis in walked[-2:]:
            yield fault("off-by-one block", f"{operand} is fetched a block too early along axis {axis}", n, axis)
        if len(walked) > 1:
            what = f"{operand} is walked along axes {walked[-1]} and {walked[-2]} instead of {walked[-2]} and {walked[-1]}"
            yield fault("swapped index map", what, n, walked[-2], walked[-1])
    for axis in range(rank):
        yield fault("dropped last step", f"the grid ends a step early along axis {axis}", axis)
        if axis + 1 < rank:
            yield fault("grid order", f"the grid's axes {axis} and {axis + 1} change places", axis)
    for n in range(_tails(eqn)):
        yield fault("missing ragged edge", f"tail {n} is not filled", n)
    for n, dot in enumerate(_dots(eqn)):
        if dot.params["precision"] is not None and jnp.float32 in [v.aval.dtype for v in dot.invars]:
            yield fault("precision lowered", f"dot {n} is computed at DEFAULT", n)
            yield fault(_GIVEN_NO_PRECISION, f"dot {n} says no precision", n)
    said = getattr(eqn.params["compiler_params"], "dimension_semantics", None) or ()
    for axis, order in enumerate(said):
        if "arbitrary" in str(order).lower():
            yield fault("unordered grid", f"axis {axis} of the grid is called parallel", axis)
    for n, (source, target) in enumerate(eqn.params["input_output_aliases"]):
        yield fault("stale alias", f"output {target} is no longer written over operand {source}", n)


def with_fault(kernel: Kernel, fault: Fault) -> Kernel:
    """Returns a copy of a kernel, and of its gradient, whose traced programs have a fault."""
    rule = _RULES[fault.kind]

    def changed(eqn: Any, place: jaxprs.Place) -> Any:
        if eqn.primitive.name != "pallas_call" or jaxprs.kernel_name(eqn) != fault.where:
            return None
        return rule(eqn, *fault.at)

    copy = _copy(kernel, changed)
    if kernel.gradient is not None:
        copy.gradient = _copy(kernel.gradient, changed)
        copy.gradient.forward = copy
    return copy


def _copy(kernel: Kernel, rule: jaxprs.Rule) -> Kernel:
    copy = Kernel(
        declaration=kernel.declaration, fn=kernel.fn, frontend=kernel.frontend, reference=kernel.reference,
        workloads=kernel.workloads, tolerance=kernel.tolerance, build=kernel.build, vmem_limit_bytes=kernel.vmem_limit_bytes,
        reject=kernel.reject, adopted=kernel.adopted,
    )  # fmt: skip
    copy._casts = kernel._casts
    original = kernel._frontend

    def frontend(*call: Any) -> Callable[..., tuple[jax.Array, ...]]:
        run = original(*call)

        def faulty(*arrays: Any) -> tuple[jax.Array, ...]:
            closed = jax.make_jaxpr(run)(*arrays)
            return tuple(core.jaxpr_as_fun(jaxprs.rewrite(closed, rule))(*arrays))

        return faulty

    vars(copy)["_frontend"] = frontend
    return copy


# --- what is changed of a `pallas_call`


def _with_mapping(eqn: Any, **changes: Any) -> Any:
    mapping = eqn.params["grid_mapping"]
    return eqn.replace(params={**eqn.params, "grid_mapping": mapping.replace(**changes)})


def _with_block(eqn: Any, n: int, closed: core.ClosedJaxpr) -> Any:
    blocks = list(eqn.params["grid_mapping"].block_mappings)
    blocks[n] = blocks[n].replace(index_map_jaxpr=closed)
    return _with_mapping(eqn, block_mappings=tuple(blocks))


def _early(eqn: Any, n: int, axis: int) -> Any:
    closed = eqn.params["grid_mapping"].block_mappings[n].index_map_jaxpr
    before = jax.make_jaxpr(lambda i: jax.lax.max(jax.lax.sub(i, jnp.int32(1)), jnp.int32(0)))(jnp.int32(0))
    outvars, place = list(closed.jaxpr.outvars), before.jaxpr.invars[0]
    if isinstance(outvars[axis], core.Literal):
        return eqn
    added = [e.replace(invars=[outvars[axis] if v is place else v for v in e.invars]) for e in before.jaxpr.eqns]
    outvars[axis] = before.jaxpr.outvars[0]
    jaxpr = closed.jaxpr.replace(eqns=[*closed.jaxpr.eqns, *added], outvars=outvars)
    return _with_block(eqn, n, core.ClosedJaxpr(jaxpr, closed.consts))


def _walked_otherwise(eqn: Any, n: int, first: int, second: int) -> Any:
    closed = eqn.params["grid_mapping"].block_mappings[n].index_map_jaxpr
    outvars = list(closed.jaxpr.outvars)
    outvars[first], outvars[second] = outvars[second], outvars[first]
    return _with_block(eqn, n, core.ClosedJaxpr(closed.jaxpr.replace(outvars=outvars), closed.consts))


def _shorter(eqn: Any, axis: int) -> Any:
    grid = list(eqn.params["grid_mapping"].grid)
    grid[axis] = max(1, grid[axis] - 1)
    return _with_mapping(eqn, grid=tuple(grid))


def _reordered(eqn: Any, axis: int) -> Any:
    grid = list(eqn.params["grid_mapping"].grid)
    grid[axis], grid[axis + 1] = grid[axis + 1], grid[axis]
    return _with_mapping(eqn, grid=tuple(grid))


def _parallel(eqn: Any, axis: int) -> Any:
    params = eqn.params["compiler_params"]
    said = list(params.dimension_semantics)
    said[axis] = said[axis].__class__("parallel") if not isinstance(said[axis], str) else "parallel"
    changed = dataclasses.replace(params, dimension_semantics=tuple(said))
    return eqn.replace(params={**eqn.params, "compiler_params": changed})


def _unaliased(eqn: Any, n: int) -> Any:
    aliases = eqn.params["input_output_aliases"]
    return eqn.replace(params={**eqn.params, "input_output_aliases": aliases[:n] + aliases[n + 1 :]})


def _dots(eqn: Any) -> list[Any]:
    return [e for e in jaxprs.equations(eqn.params["jaxpr"]) if e.primitive.name == "dot_general"]


def _with_precision(precision: Any) -> Callable[[Any, int], Any]:
    def change(eqn: Any, n: int) -> Any:
        count = -1

        def rule(inner: Any, place: jaxprs.Place) -> Any:
            nonlocal count
            if inner.primitive.name != "dot_general":
                return None
            count += 1
            exact = jnp.float32 in [v.aval.dtype for v in inner.invars]
            return inner.replace(params={**inner.params, "precision": precision}) if count == n and exact else None

        closed = jaxprs.rewrite(core.ClosedJaxpr(eqn.params["jaxpr"], ()), rule)
        return eqn.replace(params={**eqn.params, "jaxpr": closed.jaxpr})

    return change


def _tails(eqn: Any) -> int:
    return sum(len(_filled(eqn, cond)) for cond in eqn.params["jaxpr"].eqns)


def _filled(eqn: Any, cond: Any) -> list[tuple[int, int]]:
    """Returns the writes to input blocks in a `cond` of a kernel: branch, place in it."""
    if cond.primitive.name != "cond":
        return []
    mapping = eqn.params["grid_mapping"]
    first = mapping.num_index_operands
    inputs = eqn.params["jaxpr"].invars[first : first + mapping.num_inputs]
    found = []
    for b, branch in enumerate(cond.params["branches"]):
        outer = dict(zip(branch.jaxpr.invars, cond.invars[1:], strict=True))
        for at, inner in enumerate(branch.jaxpr.eqns):
            ref = inner.invars[0] if inner.primitive.name in _WRITES else None
            if not isinstance(ref, core.Literal) and any(outer.get(ref) is v for v in inputs):
                found.append((b, at))
    return found


def _unfilled(eqn: Any, n: int) -> Any:
    jaxpr, left = eqn.params["jaxpr"], n
    eqns = []
    for cond in jaxpr.eqns:
        filled = _filled(eqn, cond)
        if 0 <= left < len(filled):
            b, at = filled[left]
            branches = list(cond.params["branches"])
            inner = branches[b].jaxpr
            kept = [e for place, e in enumerate(inner.eqns) if place != at]
            branches[b] = core.ClosedJaxpr(inner.replace(eqns=kept), branches[b].consts)
            cond = cond.replace(params={**cond.params, "branches": tuple(branches)})
        left -= len(filled)
        eqns.append(cond)
    return eqn.replace(params={**eqn.params, "jaxpr": jaxpr.replace(eqns=eqns)})


_DEFAULT: Final = (jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT)
_RULES: Final[dict[str, Callable[..., Any]]] = {
    "off-by-one block": _early,
    "swapped index map": _walked_otherwise,
    "dropped last step": _shorter,
    "grid order": _reordered,
    "missing ragged edge": _unfilled,
    "precision lowered": _with_precision(_DEFAULT),
    _GIVEN_NO_PRECISION: _with_precision(None),
    "unordered grid": _parallel,
    "stale alias": _unaliased,
}
