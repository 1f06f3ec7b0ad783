"""The tile form: one `pallas_call` from a declaration, its geometry and a body."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpukern.dsl import context
from tpukern.dsl import dims as d
from tpukern.dsl.declaration import Parameter, each_output
from tpukern.dsl.geometry import Geometry, Tail
from tpukern.dsl.grid import Dim, all_of, step
from tpukern.dsl.roles import Accumulator, Input, Output, ScalarInput, Table
from tpukern.errors import SignatureError


def build(body: Callable[..., None], geometry: Geometry, vmem_limit_bytes: int | None) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the JAX callable of a tile kernel: inputs in declared order to a tuple of outputs.

    Raises:
        SignatureError: A dim of size zero leaves an output that nothing would write.
    """
    if not _has_steps(geometry):
        return functools.partial(_nothing_to_do, _constants(geometry))
    k, signature = geometry.declaration, geometry.signature
    inputs = [*k.tables, *(o for o in k.inputs if not isinstance(o.role, Table))]
    place = {o.name: n for n, o in enumerate(k.inputs)}
    grid_keywords = _grid_keywords(geometry, inputs)
    alias = {
        next(n for n, o in enumerate(inputs) if o.name == role.alias): n
        for n, (_, role) in enumerate(each_output(k))
        if role.alias is not None
    }
    params = pltpu.CompilerParams(
        dimension_semantics=tuple("arbitrary" if name in geometry.sequential else "parallel" for name in geometry.order),
        vmem_limit_bytes=vmem_limit_bytes,
    )
    wrapped = _wrap(body, geometry, inputs)

    def call(*arrays: Any) -> tuple[jax.Array, ...]:
        results = pl.pallas_call(
            wrapped,
            out_shape=[jax.ShapeDtypeStruct(geometry.array_shape(o), geometry.dtype(o)) for o in k.outputs],
            input_output_aliases=alias,
            compiler_params=params,
            interpret=context.interpreted(),
            name=k.kernel,
            **grid_keywords,
        )(*(_shaped(arrays[place[o.name]], _kernel_shape(geometry, o)) for o in inputs))
        return tuple(_shaped(result, o.shape).astype(o.dtype) for result, o in zip(results, signature.outputs, strict=True))

    return call


def _shaped(array: Any, shape: tuple[int, ...]) -> Any:
    return array if array.shape == shape else jnp.reshape(array, shape)


def _kernel_shape(geometry: Geometry, o: Parameter) -> tuple[int, ...]:
    return (1,) if isinstance(o.role, ScalarInput) else geometry.array_shape(o)


def _has_steps(geometry: Geometry) -> bool:
    used = {name for o in geometry.declaration.operands for name in o.names}
    return all(geometry.signature.sizes[name] for name in used)


def _constants(geometry: Geometry) -> list[tuple[tuple[int, ...], str, float]]:
    """Returns (shape, dtype, value) of each output of a call that has nothing to walk over."""
    k, signature = geometry.declaration, geometry.signature
    found = []
    for (o, role), result in zip(each_output(k), signature.outputs, strict=True):
        zero = sorted(name for name, size in signature.sizes.items() if not size)
        if math.prod(result.shape) and not (role.init is not None and set(zero) & set(geometry.summed(o))):
            raise SignatureError(
                k.kernel,
                f"{zero[0]!r} is 0 and output {o.name} is not empty",
                "the reference to be called",
                "Zero-size reductions never reach the kernel.",
            )
        found.append((result.shape, result.dtype, role.init or 0))
    return found


def _nothing_to_do(constants: list[tuple[tuple[int, ...], str, float]], *arrays: Any) -> tuple[jax.Array, ...]:
    return tuple(jnp.full(shape, value, dtype) for shape, dtype, value in constants)


def _grid_keywords(geometry: Geometry, inputs: list[Parameter]) -> dict[str, Any]:
    k = geometry.declaration
    scratch = [
        pltpu.VMEM(tuple(b for b in geometry.block_shape(o) if b is not None), jnp.dtype(geometry.dtype(o))) for o in k.scratch
    ]
    keywords: dict[str, Any] = {
        "grid": geometry.grid,
        "in_specs": [_spec(geometry, o) for o in inputs if not isinstance(o.role, Table)],
        "out_specs": [_spec(geometry, o) for o in k.outputs],
        "scratch_shapes": scratch,
    }
    if not k.tables:
        return keywords
    return {"grid_spec": pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=len(k.tables), **keywords)}


def _spec(geometry: Geometry, o: Parameter) -> pl.BlockSpec:
    if isinstance(o.role, ScalarInput):
        return pl.BlockSpec(memory_space=pltpu.SMEM)
    tables = [table.name for table in geometry.declaration.tables]

    def index_map(*args: Any) -> tuple[Any, ...]:
        refs = dict(zip(tables, args[len(geometry.order) :], strict=True))
        dims = step(geometry, args[: len(geometry.order)], refs)
        return tuple(_block_index(geometry, axis, dims, refs) for axis in o.axes)

    return pl.BlockSpec(geometry.block_shape(o), index_map)


def _block_index(geometry: Geometry, axis: d.Axis, dims: Mapping[str, Dim], tables: Mapping[str, Any]) -> Any:
    """Returns which block of one axis a step asks for."""
    if isinstance(axis, d.Exact):
        return 0
    if isinstance(axis, d.Lookup):
        return tables[axis.table][tuple(dims[name].fetched for name in axis.at)]
    index: Any = 0
    for name in d.names_of(axis):
        if name in dims:
            index = dims[name].fetched if isinstance(index, int) else index * dims[name].count + dims[name].fetched
    return index


def _wrap(body: Callable[..., None], geometry: Geometry, inputs: list[Parameter]) -> Callable[..., None]:
    """Returns the function that `pallas_call` traces: it prepares dims, accumulators and ragged tails, then calls the body."""
    k = geometry.declaration
    names = [o.name for o in (*inputs, *k.outputs, *k.scratch)]
    tables = [o.name for o in k.tables]
    grid_rank = len(geometry.order)
    choices = {name: geometry.config[name] for name in k.choices}

    def run(*refs: Any) -> None:
        by_name = dict(zip(names, refs, strict=True))
        dims = step(geometry, tuple(pl.program_id(n) for n in range(grid_rank)), {name: by_name[name] for name in tables})
        _set_accumulators(geometry, dims, by_name)
        _fill_tails(geometry, dims, by_name)
        body(*(by_name[o.name] for o in k.operands), **dims, **choices, **geometry.signature.statics)

    return run


def _set_accumulators(geometry: Geometry, dims: Mapping[str, Dim], refs: Mapping[str, Any]) -> None:
    by_dims: dict[tuple[str, ...], list[tuple[Any, float]]] = {}
    for o in geometry.declaration.operands:
        if isinstance(o.role, Accumulator | Output) and o.role.init is not None:
            by_dims.setdefault(geometry.summed(o), []).append((refs[o.name], o.role.init))
    for summed, group in by_dims.items():

        @pl.when(all_of(*(dims[name].first for name in summed)))
        def _set(group: list[tuple[Any, float]] = group) -> None:
            for ref, value in group:
                ref[...] = jnp.full(ref.shape, value, ref.dtype)


def _fill_tails(geometry: Geometry, dims: Mapping[str, Dim], refs: Mapping[str, Any]) -> None:
    """Stores each input's `fill` past the end of what is summed over, on the steps that hold the block which is cut short.

    It is the block fetched that counts, not the step: with a span, the step may hold an earlier one.
    """
    groups: dict[tuple[Any, int], list[tuple[Any, Tail, float]]] = {}
    for o in geometry.declaration.inputs:
        if isinstance(o.role, Input):
            for tail in geometry.fills(o):
                where = tail.axis if isinstance(tail.axis, d.Lookup) else d.names_of(tail.axis)
                groups.setdefault((where, tail.last), []).append((refs[o.name], tail, o.role.fill))
    for (_, last), group in groups.items():

        @pl.when(_block_index(geometry, group[0][1].axis, dims, refs) == last)
        def _fill(group: list[tuple[Any, Tail, float]] = group) -> None:
            for ref, tail, value in group:
                outside = (*(slice(None),) * tail.ref_axis, slice(tail.real, ref.shape[tail.ref_axis]))
                shape = (*ref.shape[: tail.ref_axis], ref.shape[tail.ref_axis] - tail.real, *ref.shape[tail.ref_axis + 1 :])
                ref[outside] = jnp.full(shape, value, ref.dtype)
