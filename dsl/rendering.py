"""A bound kernel as text, and names for what the jaxpr only numbers."""

import dataclasses
from typing import TYPE_CHECKING, Any

from tpukern.dsl.geometry import Geometry
from tpukern.dsl.roles import Table

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
    calls: tuple[Any, ...] = bound.calls
    return "\n".join([*lines, *(call.text() for call in calls or ())] + ([] if calls else ["no pallas_call"]))
