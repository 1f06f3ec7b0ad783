"""Where the blocks lie: grid, block shapes and VMEM of one signature under one config, without any tracing."""

import dataclasses
import functools
import math
from typing import Final

from tpukern.dsl import dims as d
from tpukern.dsl import dtypes, rules
from tpukern.dsl.config import Config
from tpukern.dsl.declaration import Declaration, Parameter
from tpukern.dsl.roles import Accumulator, Input, Output, ScalarInput, ScratchSpace, Table
from tpukern.dsl.signature import Signature, axis_size
from tpukern.errors import ConfigError, LowerError, TpukernError, did_you_mean

LANES: Final = 128
SUBLANES: Final = 8


@dataclasses.dataclass(frozen=True)
class Extent:
    """One dim under one config.

    Attributes:
        size: The whole dim.
        block: What one grid step covers.
        count: How many steps cover the dim.
    """

    size: int
    block: int
    count: int

    @property
    def ragged(self) -> bool:
        """Whether the last block reaches past the end."""
        return self.size % self.block != 0 if self.block else False

    def splits(self, unit: int) -> bool:
        """Whether a unit of that many positions lies in two blocks."""
        return self.count > 1 and self.block % unit != 0


@dataclasses.dataclass(frozen=True)
class Tail:
    """The part of an input's last block that lies past the end of the array.

    Attributes:
        ref_axis: The axis of the ref.
        axis: The same in the declaration.
        real: Positions of the block that the array has.
        last: Index of the block.
    """

    ref_axis: int
    axis: d.Axis
    real: int
    last: int


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A tile kernel's grid and blocks for one signature and config."""

    declaration: Declaration
    signature: Signature
    config: Config

    @functools.cached_property
    def order(self) -> tuple[str, ...]:
        """The grid dims, outermost first."""
        order = self.config.get("order")
        return tuple(order.split()) if order else self.declaration.grid

    @functools.cached_property
    def extents(self) -> dict[str, Extent]:
        """Every dim that has a Block or an Each."""
        found = {}
        for name, dim in self.declaration.dims.items():
            size = self.signature.sizes[name]
            block = 1 if dim.each else min(self.config[f"block_{name}"], size)
            found[name] = Extent(size, block, -(-size // block) if block else 0)
        return found

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(self.extents[name].count for name in self.order)

    def axis_block(self, axis: d.Axis) -> int | None:
        """Returns the block's extent along an axis; None if the grid walks it one position a step."""
        extents = self.extents
        if isinstance(axis, d.Exact):
            return axis.size
        if isinstance(axis, d.Group):
            last = axis.names[-1]
            if not any(name in extents for name in axis.names):
                return axis_size(axis, self.signature.sizes)
            return self.axis_block(d.Named(last))
        if axis.name not in extents:
            return axis_size(axis, self.signature.sizes)
        if self.declaration.dims[axis.name].each:
            return None
        block = extents[axis.name].block
        if isinstance(axis, d.Per):
            return axis_size(axis, self.signature.sizes) if extents[axis.name].count == 1 else block // axis.per
        return block

    def block_shape(self, o: Parameter) -> tuple[int | None, ...]:
        return tuple(self.axis_block(axis) for axis in o.axes)

    def array_shape(self, o: Parameter) -> tuple[int, ...]:
        """Returns the shape that the kernel's blocks are cut from: leading axes as one, `_` as an axis of size one."""
        return tuple(axis_size(axis, self.signature.sizes) for axis in o.axes)

    def dtype(self, o: Parameter) -> str:
        """Returns the element type of an operand's blocks."""
        dtype = o.role.dtype or self.signature.dtype
        assert dtype is not None
        return dtype

    def summed(self, o: Parameter) -> tuple[str, ...]:
        return self.declaration.summed(o, self.order)

    @functools.cached_property
    def sequential(self) -> frozenset[str]:
        """Dims whose steps depend on one another: summed over, carried in scratch, or walked through a table."""
        found: set[str] = set()
        for o in self.declaration.operands:
            if isinstance(o.role, Output | Accumulator | ScratchSpace):
                found.update(self.summed(o))
            if isinstance(o.role, Output):
                found.update(name for axis in o.axes if isinstance(axis, d.Lookup) for name in axis.at)
        return frozenset(found)

    @functools.cached_property
    def summed_over(self) -> frozenset[str]:
        """Dims that some output or accumulator is summed over."""
        roles = Output | Accumulator
        return frozenset(name for o in self.declaration.operands if isinstance(o.role, roles) for name in self.summed(o))

    def fills(self, o: Parameter) -> tuple[Tail, ...]:
        """Returns what has to be filled in the last block of an input: axes cut short whose positions are summed over."""
        found, at = [], 0
        for axis in o.axes:
            block = self.axis_block(axis)
            if block is None:
                continue
            extent = self.extents.get(axis.name) if isinstance(axis, d.Named | d.Per | d.Lookup) else None
            if extent is not None and self.summed_over.intersection(d.walked_by(axis)):
                real = axis_size(axis, self.signature.sizes) - (extent.count - 1) * block
                if extent.count > 1 and real < block:
                    found.append(Tail(at, axis, real, extent.count - 1))
            at += 1
        return tuple(found)

    @functools.cached_property
    def vmem_bytes(self) -> int:
        """A cautious estimate: two buffers for every pipelined block, scratch, and one f32 copy of the largest block."""
        total = largest = 0
        for o in self.declaration.operands:
            if isinstance(o.role, Table | ScalarInput):
                continue
            shape = tuple(block for block in self.block_shape(o) if block is not None)
            padded = _padded(shape, dtypes.item_bytes(self.dtype(o)))
            total += padded * (2 if isinstance(o.role, Input | Output) else 1)
            largest = max(largest, _padded(shape, 4))
        return total + largest

    def problem(self) -> TpukernError | None:
        """Returns why this config cannot run this signature, or None."""
        return self._order_problem() or self._block_problem() or self._tiling_problem()

    def _order_problem(self) -> ConfigError | None:
        k, order = self.declaration, self.order
        if sorted(order) != sorted(k.grid):
            unknown = [name for name in order if name not in k.grid]
            do = did_you_mean(unknown[0], k.grid) if unknown else ""
            return ConfigError(k.kernel, f"order {' '.join(order)!r}", f"each of {list(k.grid)} once", do)
        breach = rules.order_breach(k, order)
        return ConfigError(k.kernel, *breach) if breach else None

    def _block_problem(self) -> ConfigError | None:
        k = self.declaration
        for name in k.blocks:
            extent, value = self.extents[name], self.config[f"block_{name}"]
            if value % SUBLANES and value < extent.size:
                rule = "a multiple of 8, or at least the size of the dim"
                return ConfigError(k.kernel, f"block_{name} = {value}", rule)
        for o in k.operands:
            for axis in o.axes:
                if isinstance(axis, d.Group) and (last := self.extents.get(axis.names[-1])) and last.ragged:
                    rule = f"a divisor of {axis.names[-1]} ({last.size}), the last dim of {axis} in {o.name}"
                    return ConfigError(k.kernel, f"block_{axis.names[-1]} = {last.block}", rule)
                if isinstance(axis, d.Per) and (walked := self.extents.get(axis.name)) and walked.splits(axis.per):
                    rule = f"a multiple of {axis.per}, since {o} has one entry for each {axis.per} of {axis.name}"
                    return ConfigError(k.kernel, f"block_{axis.name} = {walked.block}", rule)
        return self._table_problem()

    def _table_problem(self) -> ConfigError | None:
        """A table entry found by the index of a block has to be one entry a block."""
        k = self.declaration
        tables = {o.name: o for o in k.tables}
        for _, axis in k.lookups:
            for at, entry in zip(axis.at, tables[axis.table].axes, strict=True):
                extent = self.extents[at]
                if isinstance(entry, d.Per) and entry.name == at and extent.count > 1 and extent.block != entry.per:
                    rule = f"{entry.per}, since {tables[axis.table]} has an entry for each {entry.per} of {at}"
                    return ConfigError(k.kernel, f"block_{at} = {extent.block}", rule)
        return None

    def _tiling_problem(self) -> LowerError | None:
        """Mosaic's rule for the last two axes of a block: multiples of (8, 128), or the whole axis."""
        k = self.declaration
        for o in (*(i for i in k.inputs if isinstance(i.role, Input)), *k.outputs):
            blocks = [1 if block is None else block for block in self.block_shape(o)]
            array = self.array_shape(o)
            for back, multiple, where in ((1, LANES, "last"), (2, SUBLANES, "second-to-last")):
                if len(blocks) >= back and blocks[-back] % multiple and blocks[-back] != array[-back]:
                    found = f"{o} is blocked {tuple(blocks)} of {array}: {blocks[-back]} on its {where} axis {o.axes[-back]}"
                    rule = f"a multiple of {multiple} or all {array[-back]}"
                    return LowerError(k.kernel, found, rule, "Make that dim whole, or move it left.")
        return None


def _padded(shape: tuple[int, ...], item_bytes: int) -> int:
    """Returns the bytes of a block in VMEM, where it is made of (8, 128) tiles of 4 bytes (packed for smaller types)."""
    sublanes = SUBLANES * max(1, 4 // item_bytes)
    rows, lanes = shape[-2], shape[-1]
    return math.prod(shape[:-2]) * -(-rows // sublanes) * sublanes * -(-lanes // LANES) * LANES * item_bytes
