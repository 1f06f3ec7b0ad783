"""A bound kernel as text, and names for what the jaxpr only numbers."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tpukern.dsl.geometry import Geometry
from tpukern.dsl.roles import Accumulator, Input, Output, Table

if TYPE_CHECKING:
    from tpukern.dsl.bound import Bound
    from tpukern.dsl.ir import PallasCall


def named(bound: "Bound", call: "PallasCall") -> "PallasCall":
    """Returns `call` with the dims' and operands' names of the tile kernel that made it; itself if none did."""
    geometry = _geometry(bound, call.name)
    if geometry is None or len(geometry.order) != len(call.grid):
        return call
    k = geometry.declaration
    inputs = [o.name for o in k.inputs if not isinstance(o.role, Table)]
    if len(inputs) != len(call.inputs) or len(k.outputs) != len(call.outputs):
        return call
    return dataclasses.replace(
        call,
        grid_names=geometry.order,
        inputs=tuple(dataclasses.replace(use, name=name) for use, name in zip(call.inputs, inputs, strict=True)),
        outputs=tuple(dataclasses.replace(use, name=o.name) for use, o in zip(call.outputs, k.outputs, strict=True)),
    )


def _geometry(bound: "Bound", name: str) -> Geometry | None:
    """Returns the geometry of the tile kernel called `name`: the bound one, or one that it calls."""
    kernel = bound.kernel
    if kernel.is_tile:
        return Geometry(kernel.declaration, bound.signature, bound.config) if kernel.name == name else None
    for call in kernel.calls((bound.signature,)):
        inner = bound.config.within(call.kernel.name)
        if call.kernel.name == name and call.kernel.is_tile and not call.pinned:
            return Geometry(call.kernel.declaration, call.signatures[0], inner)
    return None


def render(bound: "Bound") -> str:
    """Returns a readable account of a bound kernel."""
    lines = [str(bound.signature), f"config: {bound.config or 'none'}"]
    lines.append("sizes: " + ", ".join(f"{name}={size}" for name, size in bound.signature.sizes.items()))
    if bound.target:
        lines.append(f"target: {bound.target.name}, {bound.target.scoped_vmem_bytes:,} bytes of VMEM for one kernel")
    for call in bound.calls:
        lines.append(call.text())
        geometry = _geometry(bound, call.name)
        lines += _sets(geometry) if geometry else ()
    return "\n".join(lines if bound.calls else [*lines, "no pallas_call"])


def _sets(geometry: Geometry) -> Iterator[str]:
    """Says what the form does by itself before the body: accumulators set, tails filled."""
    for o in geometry.declaration.operands:
        if isinstance(o.role, Accumulator | Output) and o.role.init is not None:
            summed = " and ".join(geometry.summed(o))
            yield f"  {o} is set to {o.role.init:g} at {f'the first step of {summed}' if summed else 'every step'}"
        if isinstance(o.role, Input):
            for tail in geometry.fills(o):
                yield f"  {o} is filled with {o.role.fill:g} past the end of {tail.axis}"
