"""What the compiler will be given, read off the jaxpr: every ``pallas_call`` that a JAX callable makes.

It does not matter who wrote the callable. Checks, estimates and texts read these records, never the frontend's own.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tpukern import jax_adapter
from tpukern.dsl import index_text
from tpukern.targets import TARGETS, Target

_LANES, _SUBLANES = 128, 8


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class IndexMap:
    """Which block of an array a grid step sees.

    Attributes:
        grid_rank: How many grid indices it takes.
        tables: Shapes of the scalar-prefetch arrays that it takes after them.
        jaxpr: The closed jaxpr it was read from.
    """

    grid_rank: int
    tables: tuple[tuple[int, ...], ...]
    jaxpr: Any = dataclasses.field(repr=False)

    @functools.cached_property
    def _function(self) -> Callable[..., tuple[Any, ...]]:
        return jax_adapter.index_function(self.jaxpr)

    def __call__(self, *indices: int, tables: Sequence[Any] = ()) -> tuple[int, ...]:
        """Returns the block's index at one grid step.

        Args:
            *indices: One for each grid dimension.
            tables: Values of the scalar-prefetch arrays. None are needed by a map that reads none.
        """
        out = self._function(*(np.int32(i) for i in indices), *self._tables(tables))
        return tuple(int(i) for i in out)

    def over(self, grid: Sequence[int], tables: Sequence[Any] = ()) -> np.ndarray:
        """Returns the block's index at every step of a grid, in the order they run.

        Returns:
            int32 of shape (steps, rank of the array), the last grid dimension fastest.
        """
        import jax

        steps = math.prod(grid)
        places = np.unravel_index(np.arange(steps), tuple(grid)) if grid else ()
        values = self._tables(tables)
        many = jax.jit(jax.vmap(lambda *ids: self._function(*ids, *values), axis_size=steps))
        columns = many(*(np.asarray(p, np.int32) for p in places))
        return np.stack([np.broadcast_to(np.asarray(c, np.int32), (steps,)) for c in columns], axis=1).reshape(steps, -1)

    def _tables(self, tables: Sequence[Any]) -> tuple[np.ndarray, ...]:
        if self.reads_tables and len(tables) != len(self.tables):
            raise ValueError(f"{len(tables)} scalar-prefetch arrays given; the index map takes {len(self.tables)}")
        given = tables if self.reads_tables else [np.zeros(shape, np.int32) for shape in self.tables]
        return tuple(np.asarray(table, np.int32) for table in given)

    @functools.cached_property
    def reads_tables(self) -> bool:
        """Whether the block depends on scalar-prefetch values."""
        return any(equation.primitive.name == "get" for equation in _equations(self.jaxpr.jaxpr))

    @functools.cached_property
    def depends_on(self) -> tuple[int, ...]:
        """The grid dimensions that can change the block."""
        return index_text.dependencies(self.jaxpr.jaxpr, self.grid_rank)

    def text(self, grid_names: Sequence[str] = (), table_names: Sequence[str] = ()) -> str:
        """Returns the map as Python would write it, such as ``(i, min(j, i // 2), 0)``."""
        return index_text.render(self.jaxpr, self.grid_rank, grid_names, table_names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockUse:
    """An array operand as the kernel sees it.

    Attributes:
        name: Where it came from, such as ``args[0]`` or ``outputs[1]``.
        shape: The whole array's.
        dtype: Its element type.
        block: Block sizes; None for a squeezed axis. The whole shape if it is not pipelined.
        memory_space: "vmem", "smem", "any", ...
        buffers: How many copies of the block the pipeline holds; 1 if it is not pipelined.
        element_axes: Axes whose index counts elements, not blocks.
        index_map: Which block each grid step sees.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    block: tuple[int | None, ...]
    memory_space: str
    buffers: int
    element_axes: tuple[int, ...]
    index_map: IndexMap

    @property
    def ref_shape(self) -> tuple[int, ...]:
        """The shape the kernel's body sees."""
        return tuple(size for size in self.block if size is not None)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block moves between HBM and VMEM."""
        return int(math.prod(self.ref_shape) * _itemsize(self.dtype))

    @property
    def vmem_bytes(self) -> int:
        """VMEM that its buffers take, as tiles of (8, 128) 32-bit words."""
        return self.buffers * padded_bytes(self.ref_shape, self.dtype) if self.memory_space == "vmem" else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """A scratch buffer, or a scalar-prefetch array.

    Attributes:
        shape: Its shape.
        dtype: Element type, or the kind of semaphore.
        memory_space: "vmem", "smem", "semaphore_mem", ...
    """

    shape: tuple[int, ...]
    dtype: str
    memory_space: str

    @property
    def vmem_bytes(self) -> int:
        """VMEM that it takes."""
        return padded_bytes(self.shape, self.dtype) if self.memory_space == "vmem" else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PallasCall:
    """One ``pallas_call``.

    Attributes:
        name: The kernel's name.
        grid: Sizes of the grid, outermost first; None where only the device knows.
        grid_names: Names of its dimensions, if the caller gave any.
        dimension_semantics: "parallel", "arbitrary", ... for each, or empty.
        prefetch: The scalar-prefetch arrays.
        inputs: The arrays read.
        outputs: The arrays written.
        scratch: The scratch buffers.
        aliases: Pairs (operand, output) that share memory; operands counted with the prefetch arrays.
        vmem_limit_bytes: The kernel's own scoped VMEM limit, or None.
        cost: ``flops``, ``transcendentals`` and ``bytes_accessed`` that the kernel claims, if it does.
        flags: Compiler flags and other parameters that differ from Pallas's defaults.
        interpret: Whether it was traced in interpret form.
        repeats: How often the program runs it, scans multiplied out; None if a while loop decides.
        conditional: Whether a ``cond`` may skip it.
        temporaries_bytes: VMEM that the body's intermediate values may take: an estimate, see ``vmem_estimate_bytes``.
        body: The kernel's jaxpr.
    """

    name: str
    grid: tuple[int | None, ...]
    grid_names: tuple[str, ...]
    dimension_semantics: tuple[str, ...]
    prefetch: tuple[Buffer, ...]
    inputs: tuple[BlockUse, ...]
    outputs: tuple[BlockUse, ...]
    scratch: tuple[Buffer, ...]
    aliases: tuple[tuple[int, int], ...]
    vmem_limit_bytes: int | None
    cost: dict[str, int] | None
    flags: dict[str, Any]
    interpret: bool
    repeats: int | None
    conditional: bool
    temporaries_bytes: int
    body: Any = dataclasses.field(repr=False, compare=False)

    @property
    def blocks(self) -> tuple[BlockUse, ...]:
        """Inputs, then outputs."""
        return self.inputs + self.outputs

    @property
    def steps(self) -> int | None:
        """Grid steps, or None if only the device knows."""
        return None if None in self.grid else math.prod(size for size in self.grid if size is not None)

    @property
    def vmem_estimate_bytes(self) -> int:
        """An upper estimate of the scoped VMEM it needs: all buffers of all blocks, scratch and the body's temporaries.

        For choosing defaults only: the compiler shares and shrinks temporaries as it likes, and it judges.
        """
        buffers = sum(use.vmem_bytes for use in self.blocks) + sum(buffer.vmem_bytes for buffer in self.scratch)
        return buffers + self.temporaries_bytes

    def text(self) -> str:
        """Returns a readable account, one line a part."""
        return "\n".join(_lines(self))


def calls_of(function: Callable[..., Any], *specs: Any, target: Target | None = None) -> tuple[PallasCall, ...]:
    """Traces a JAX callable and returns the ``pallas_call``s in it, in program order, however deep they are nested.

    Args:
        function: Any JAX callable of arrays.
        *specs: What it takes: arrays or ``jax.ShapeDtypeStruct``.
        target: The chip to trace for, since kernels may ask for it; None traces for v5e.
    """
    jax_adapter.load()
    with jax_adapter.device_context(target or TARGETS["v5e"]):
        jaxpr = jax_adapter.jaxpr_of(function, specs)
    return tuple(_calls(jaxpr.jaxpr, 1, False))


def _calls(jaxpr: Any, repeats: int | None, conditional: bool) -> Iterator[PallasCall]:
    for equation in jaxpr.eqns:
        kind, inner_repeats = equation.primitive.name, repeats
        if kind == "pallas_call":
            yield _read(equation.params, repeats, conditional)
            continue
        if kind == "scan":
            inner_repeats = None if repeats is None else repeats * equation.params["length"]
        elif kind == "while":
            inner_repeats = None
        for value in equation.params.values():
            for inner in jax_adapter.inner_jaxprs(value):
                yield from _calls(inner, inner_repeats, conditional or kind == "cond")


def _read(params: dict[str, Any], repeats: int | None, conditional: bool) -> PallasCall:
    mapping = params["grid_mapping"]
    settings = _settings(params["compiler_params"])
    rank = len(mapping.grid)
    tables = mapping.index_map_avals[rank:]
    shapes = tuple(tuple(table.shape) for table in tables)
    uses = [_block(block, rank, shapes) for block in mapping.block_mappings]
    cost = params.get("cost_estimate")
    return PallasCall(
        name=params["name"] or params["jaxpr"].debug_info.func_name,
        grid=tuple(jax_adapter.grid_dim(size) for size in mapping.grid),
        grid_names=tuple(str(name) for name in mapping.grid_names or ()),
        dimension_semantics=tuple(_word(s) for s in settings.pop("dimension_semantics", None) or ()),
        prefetch=tuple(_buffer(table, "smem") for table in tables),
        inputs=tuple(uses[: mapping.num_inputs]),
        outputs=tuple(uses[mapping.num_inputs :]),
        scratch=tuple(_buffer(aval, "vmem") for aval in mapping.scratch_avals),
        aliases=tuple((int(i), int(o)) for i, o in params["input_output_aliases"]),
        vmem_limit_bytes=settings.pop("vmem_limit_bytes", None),
        cost=None if cost is None else {f: getattr(cost, f) for f in ("flops", "transcendentals", "bytes_accessed")},
        flags=settings,
        interpret=bool(params["interpret"]),
        repeats=repeats,
        conditional=conditional,
        temporaries_bytes=_temporaries_bytes(params["jaxpr"]),
        body=params["jaxpr"],
    )


def _settings(compiler_params: Any) -> dict[str, Any]:
    """The compiler parameters that were set, by name."""
    if compiler_params is None or not dataclasses.is_dataclass(compiler_params):
        return {}
    plain: Any = type(compiler_params)()  # type: ignore[misc]
    fields = (field.name for field in dataclasses.fields(compiler_params))
    return {f: getattr(compiler_params, f) for f in fields if getattr(compiler_params, f) != getattr(plain, f)}


def _block(mapping: Any, rank: int, tables: tuple[tuple[int, ...], ...]) -> BlockUse:
    dims = [jax_adapter.block_dim(dim) for dim in mapping.block_shape]
    space = _word(mapping.transformed_block_aval.memory_space or "vmem")
    pipelined = space not in ("any", "hbm", "semaphore_mem", "host")
    mode = getattr(mapping.pipeline_mode, "buffer_count", None)
    return BlockUse(
        name=str(mapping.origin),
        shape=tuple(mapping.array_aval.shape),
        dtype=str(mapping.array_aval.dtype),
        block=tuple(size for size, _ in dims),
        memory_space=space,
        buffers=(mode or 2) if pipelined else 1,
        element_axes=tuple(axis for axis, (_, elements) in enumerate(dims) if elements),
        index_map=IndexMap(grid_rank=rank, tables=tables, jaxpr=mapping.index_map_jaxpr),
    )


def _buffer(aval: Any, default: str) -> Buffer:
    inner = getattr(aval, "inner_aval", aval)
    space = _word(getattr(aval, "memory_space", None) or default)
    return Buffer(shape=tuple(inner.shape), dtype=str(inner.dtype), memory_space=space)


def _word(value: Any) -> str:
    word = str(getattr(value, "value", value)).lower()
    return "vmem" if word == "default" else word


def _itemsize(dtype: str) -> float:
    import jax.numpy as jnp

    return 0.5 if dtype in ("int4", "uint4", "float4_e2m1fn") else jnp.dtype(dtype).itemsize


def padded_bytes(shape: Sequence[int], dtype: str) -> int:
    """Returns what an array takes in VMEM, its last two axes padded to whole tiles of (8, 128) 32-bit words."""
    itemsize = _itemsize(dtype)
    packing = max(1, int(4 / itemsize))
    *outer, rows, columns = (1, 1, *shape)[-max(2, len(shape)) :]
    rows = -(-rows // (_SUBLANES * packing)) * _SUBLANES * packing
    return int(math.prod(outer) * rows * -(-columns // _LANES) * _LANES * itemsize)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in jax_adapter.inner_jaxprs(value):
                yield from _equations(inner)


_FREE = ("get", "broadcast_in_dim", "iota")  # read from the window, or made where they are used


def _temporaries_bytes(body: Any) -> int:
    """The most bytes of computed values that are live at once, run in program order.

    An upper bound on 72 compiles of the shipped kernels (v5e, v6e, libtpu 0.0.51), where Mosaic's temporaries took up to 0.9
    of it: the compiler fuses elementwise chains.
    """
    last: dict[Any, int] = {}
    for place, equation in enumerate(body.eqns):
        last.update((atom, place) for atom in equation.invars if not hasattr(atom, "val"))
    last.update((atom, len(body.eqns)) for atom in body.outvars if not hasattr(atom, "val"))
    sizes: dict[Any, int] = {}
    most = live = 0
    for place, equation in enumerate(body.eqns):
        inner = [_temporaries_bytes(j) for value in equation.params.values() for j in jax_adapter.inner_jaxprs(value)]
        made = {v: 0 if equation.primitive.name in _FREE else _value_bytes(v.aval) for v in equation.outvars}
        most = max(most, live + max(sum(made.values()), *inner, 0))
        sizes.update(made)
        live += sum(made.values())
        for atom in [v for v in (*equation.invars, *equation.outvars) if not hasattr(v, "val")]:
            if last.get(atom, -1) <= place:
                live -= sizes.pop(atom, 0)
    return most


def _value_bytes(aval: Any) -> int:
    is_array = bool(getattr(aval, "shape", ())) and not hasattr(aval, "inner_aval")  # else a scalar or a ref
    return padded_bytes(aval.shape, str(aval.dtype)) if is_array else 0


def _lines(call: PallasCall) -> Iterator[str]:
    names = call.grid_names or index_text.default_names(len(call.grid))
    semantics = call.dimension_semantics or ("arbitrary",) * len(call.grid)
    grid = ", ".join(f"{n}={'?' if s is None else s} {d}" for n, s, d in zip(names, call.grid, semantics, strict=True))
    often = "" if call.repeats == 1 else f", run {'?' if call.repeats is None else call.repeats} times"
    yield f"{call.name}: grid ({grid}){often}{', conditional' if call.conditional else ''}"
    for number, table in enumerate(call.prefetch):
        yield f"  prefetch t{number}: {table.dtype}{list(table.shape)} in {table.memory_space}"
    for role, uses in (("in", call.inputs), ("out", call.outputs)):
        for use in uses:
            block = ", ".join("1" if size is None else str(size) for size in use.block)
            where = f"{use.buffers} x {use.memory_space}" if use.memory_space == "vmem" else use.memory_space
            yield f"  {role} {use.name}: {use.dtype}{list(use.shape)} block ({block}) at {use.index_map.text(names)} in {where}"
    for buffer in call.scratch:
        yield f"  scratch: {buffer.dtype}{list(buffer.shape)} in {buffer.memory_space}"
    for operand, output in call.aliases:
        yield f"  alias: output {output} is operand {operand}"
    if call.vmem_limit_bytes is not None:
        yield f"  vmem limit: {call.vmem_limit_bytes:,} bytes"
    for name, flag in sorted(call.flags.items()):
        yield f"  {name}: {flag}"
    yield f"  vmem estimate: {call.vmem_estimate_bytes:,} bytes"
