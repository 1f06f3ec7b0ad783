"""The least time that the units and the memory allow, from the kernel's own jaxpr: no compiler is asked.

FLOPs are those of the dots in a kernel's body, at every grid step; dots under a condition (`pl.when`) are not counted, since
only running the conditions would tell how often they hold. Bytes are those of its blocks: one is fetched, or written back,
when its index changes from one step to the next. The time is the larger of the two at the chip's peaks; what a body does
beside dots, and what does not overlap, is not in it. So it is a bound from below, and marked as such.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tpukern import jax_adapter
from tpukern.autotune.chips import Chip
from tpukern.dsl.ir import BlockUse, PallasCall

MOST_STEPS = 4_000_000  # of a grid whose index maps are evaluated
_PASSES = {"HIGHEST": 6, "HIGH": 3}  # of the matrix unit over float32 operands


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a kernel does.

    Attributes:
        flops: Multiplications and additions in dots that every step makes.
        issued_flops: The same, each counted as often as the matrix unit passes over its operands (6 for float32 at HIGHEST).
        bytes: Moved between HBM and the core.
        gaps: What is not counted, and why.
    """

    flops: int = 0
    issued_flops: int = 0
    bytes: int = 0
    gaps: tuple[str, ...] = ()

    def seconds(self, chip: Chip) -> tuple[float, float]:
        """Returns the least time of the matrix units, and of the memory."""
        return self.issued_flops / chip.peak_flops, self.bytes / chip.sustained_bytes_per_s


def work(calls: Sequence[PallasCall], tables: Sequence[Any] = ()) -> Work:
    """Counts the work of a program's kernels."""
    flops = issued = moved = 0
    gaps: list[str] = []
    for call in calls:
        if call.steps is None or call.repeats is None:
            gaps.append(f"{call.name}: only the device knows how often it steps")
            continue
        if call.steps > MOST_STEPS:
            gaps.append(f"{call.name}: {call.steps:,} grid steps are too many to follow")
            continue
        steps = call.steps * call.repeats
        dots = list(_dots(call.body))
        for useful, passes, conditional in dots:
            if not conditional:
                flops, issued = flops + useful * steps, issued + useful * passes * steps
        if any(conditional for *_, conditional in dots):
            gaps.append(f"{call.name}: dots under a condition are not among its FLOPs")
        for use in call.blocks:
            if use.memory_space not in ("vmem", "smem"):
                gaps.append(f"{call.name}: it moves {use.name} itself")
            elif use.index_map.reads_tables and not tables:
                gaps.append(f"{call.name}: where it reads {use.name} depends on data")
            else:
                moved += _moves(use, call, tables) * use.block_bytes * call.repeats
    return Work(flops=flops, issued_flops=issued, bytes=moved, gaps=tuple(gaps))


def _moves(use: BlockUse, call: PallasCall, tables: Sequence[Any]) -> int:
    """Returns how often a block is fetched or written: its index changes, and once at the start."""
    grid = tuple(size for size in call.grid if size is not None)
    if not use.index_map.depends_on or not grid:
        return 1
    index = use.index_map.over(grid, tables)
    return 1 + int(np.count_nonzero((index[1:] != index[:-1]).any(axis=1)))


def _dots(jaxpr: Any, conditional: bool = False) -> Iterator[tuple[int, int, bool]]:
    """Yields for every dot its FLOPs, how often the matrix unit passes over its operands, and whether a condition skips it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            left, right = (v.aval for v in equation.invars)
            (contracted, _), (batch, _) = equation.params["dimension_numbers"]
            depth = math.prod(left.shape[i] for i in contracted)
            rest = math.prod(left.shape) // max(1, depth)
            columns = math.prod(right.shape) // max(1, depth * math.prod(left.shape[i] for i in batch))
            precision = equation.params["precision"]
            first = precision[0] if isinstance(precision, tuple) else precision
            wide = str(left.dtype) == "float32"
            passes = _PASSES.get(str(getattr(first, "name", first)), 1) if wide else 1
            yield 2 * rest * columns * depth, passes, conditional
        for value in equation.params.values():
            for inner in jax_adapter.inner_jaxprs(value):
                yield from _dots(inner, conditional or equation.primitive.name in ("cond", "while"))
