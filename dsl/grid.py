"""Grid dims as the body of a kernel, its index maps and its spans see them."""

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any, final

import jax
import jax.numpy as jnp

from tpukern.dsl.geometry import Extent, Geometry
from tpukern.errors import SignatureError


@final
class Dim:
    """One grid dim at one step of the grid.

    Attributes:
        name: Its name.
        size: The whole extent (a Python int, like the next three).
        block: Positions that one step covers.
        count: Steps that cover the dim.
        ragged: Whether the last block reaches past the end.
    """

    __slots__ = ("_at", "_kernel", "_span", "block", "count", "name", "ragged", "size")

    def __init__(self, kernel: str, name: str, extent: Extent, at: Any, span: Callable[[], Any] | None) -> None:
        self.name, self.size, self.block, self.count, self.ragged = name, extent.size, extent.block, extent.count, extent.ragged
        self._kernel, self._at, self._span = kernel, at, span

    @property
    def index(self) -> Any:
        """The step along this dim, a traced int32."""
        if self._at is None:
            found = f"{self.name!r} is looked up in a table, so it has no index of its own"
            raise SignatureError(self._kernel, found, "size, block, count and ragged only")
        return self._at

    @property
    def start(self) -> Any:
        """The block's first position."""
        return self.index * self.block

    @property
    def stop(self) -> Any:
        """One past the block's last position, also where the block reaches past the end of the dim."""
        return self.start + self.block

    @property
    def first(self) -> Any:
        """Whether this is the first step along the dim; Python's True if there is only one."""
        return True if self.count == 1 else self.index == 0

    @property
    def last(self) -> Any:
        """Whether this is the last step along the dim; Python's True if there is only one."""
        return True if self.count == 1 else self.index == self.count - 1

    @property
    def live(self) -> Any:
        """Whether the step is inside the dim's span; Python's True if it always is."""
        lo, hi = self._bounds()
        after = lo is None or (isinstance(lo, int) and lo <= 0) or self.stop > lo
        before = hi is None or (isinstance(hi, int) and hi >= self.size) or self.start < hi
        return all_of(after, before)

    @property
    def fetched(self) -> Any:
        """The index of the block that the step holds: `index`, kept inside the span."""
        return hold(self)

    def _bounds(self) -> tuple[Any, Any]:
        bounds = self._span() if self._span else None
        if bounds is None:
            return None, None
        if not isinstance(bounds, tuple) or len(bounds) != 2:
            kind = "an array" if isinstance(bounds, jax.Array) else f"a {type(bounds).__name__}"
            gave = f"{len(bounds)} values" if isinstance(bounds, tuple) else kind
            rule = "None or a pair (first, one past the last)"
            raise SignatureError(self._kernel, f"the span of {self.name!r} gave {gave}", rule)
        return bounds

    def positions(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        """Returns an int32 array of `shape` that holds, along `axis`, the block's positions in the dim."""
        iota = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
        return iota if self.count == 1 else iota + self.start

    def mask(self, value: jax.Array, axis: int, fill: Any) -> jax.Array:
        """Returns `value` with `fill` past the end of the dim along `axis`; `value` itself if blocks divide the dim."""
        return jnp.where(self.positions(value.shape, axis) < self.size, value, fill) if self.ragged else value


def all_of(*conditions: Any) -> Any:
    """Returns whether all hold; Python's True if all are, without a traced operation for those that are."""
    traced = [condition for condition in conditions if condition is not True]
    return functools.reduce(operator.and_, traced) if traced else True


def hold(dim: Dim) -> Any:
    """Returns the dim's index, kept inside its span: a step outside asks for a block that is there already."""
    lo, hi = dim._bounds()
    held = dim.index
    if hi is not None and not (isinstance(hi, int) and hi >= dim.size):
        held = jnp.maximum(jnp.minimum(held, (hi - 1) // dim.block), 0)
    if lo is not None and not (isinstance(lo, int) and lo < dim.block):
        held = jnp.maximum(held, jnp.minimum(lo // dim.block, dim.count - 1))
    return held


def step(geometry: Geometry, indices: tuple[Any, ...], tables: Mapping[str, Any]) -> dict[str, Dim]:
    """Returns every dim with a Block or an Each, at one step of the grid.

    Args:
        geometry: Of the call.
        indices: The step's index along each grid dim, outermost first.
        tables: The `Prefetch` refs by name.
    """
    k = geometry.declaration
    at = dict(zip(geometry.order, indices, strict=True))
    known: dict[str, Any] = {**geometry.signature.statics, **tables}
    found: dict[str, Dim] = {}

    def span(function: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: function(**{name: known[name] if name in known else found[name] for name in _wanted(function)})

    for name, dim in k.dims.items():
        found[name] = Dim(k.kernel, name, geometry.extents[name], at.get(name), span(dim.span) if dim.span else None)
    return found


@functools.lru_cache(maxsize=256)
def _wanted(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
