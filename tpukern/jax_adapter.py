"""Every private or fragile JAX name that tpukern relies on, and how JAX is brought up.

``load()`` is the way to JAX in the user's process: it checks the version and keeps JAX from starting a TPU client there,
which would load libtpu and might take the chip from torch_tpu. Everything below it assumes that JAX is loaded.

The compile worker uses ``topology_device`` and ``compile_module``; nothing else here loads libtpu.
"""

import base64
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from tpukern import environment
from tpukern.errors import ConfigError
from tpukern.targets import Target

OLDEST, NEWEST = (0, 10, 2), (0, 13)  # oldest accepted, first refused
_VERSIONS = ">=0.10.2,<0.13"


@functools.cache
def load() -> types.ModuleType:
    """Imports JAX, checks its version, and pins it to the CPU unless the user chose a platform.

    JAX chooses by itself on a TPU host ("tpu,cpu"): that stands, unless torch_tpu is loaded and so owns the chip. A
    backend that is already up is left alone.

    Raises:
        ConfigError: This JAX is older or newer than the private names used here.
    """
    version = importlib.metadata.version("jax")
    if not OLDEST <= _numbers(version) < NEWEST:
        raise ConfigError("jax", f"jax {version}", f"jax{_VERSIONS}", f"pip install 'jax{_VERSIONS}' 'jaxlib{_VERSIONS}'")
    import jax
    from jax._src import cloud_tpu_init, xla_bridge

    chosen: str | None = jax.config.jax_platforms  # type: ignore[attr-defined]
    by_jax = cloud_tpu_init.running_in_cloud_tpu_vm and chosen == "tpu,cpu" and environment.jax_platforms() is None
    free = chosen is None or (by_jax and "torch_tpu" in sys.modules)
    if free and not xla_bridge.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")
    return jax


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3])


def versions() -> dict[str, str]:
    """Returns the versions of jax and jaxlib, from their metadata: loads neither."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}


def trace_settings() -> dict[str, Any]:
    """Returns the JAX settings that change what a trace gives."""
    config = load().config
    names = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_default_prng_impl")
    return {name: getattr(config, name) for name in names}


# TensorCores that one device of the target's topology has (libtpu 0.0.51: only v5p describes megacore devices).
_CORES = {"v5p": 2}


@contextlib.contextmanager
def device_context(target: Target) -> Iterator[None]:
    """Makes JAX trace for ``target``: what a kernel asks of the chip (``pltpu.get_tpu_info``) is answered for it."""
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh

    device = AbstractDevice(target.device_kind, _CORES.get(target.name, 1), "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


@contextlib.contextmanager
def cpu_as(target: Target) -> Iterator[None]:
    """Answers for ``target`` what a kernel asks of the chip while JAX traces for the CPU (interpret form)."""
    from jax._src.pallas.mosaic import tpu_info

    version = tpu_info.chip_version_from_device_kind(target.device_kind)
    assert version is not None, f"jax does not know {target.device_kind}"
    before = tpu_info.registry.get("cpu")
    tpu_info.registry["cpu"] = lambda: tpu_info.get_tpu_info_for_chip(version, 1)
    try:
        yield
    finally:
        if before is None:
            del tpu_info.registry["cpu"]
        else:
            tpu_info.registry["cpu"] = before


def retraced(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns ``function`` as a new callable of that name.

    JAX keeps traces by the callable's identity and by its own settings, not by ours: under another context (interpret form or
    not) the same callable would give its old trace.
    """

    def run(*arrays: Any) -> Any:
        return function(*arrays)

    run.__name__ = run.__qualname__ = name
    return run


def export_for_tpu(function: Callable[..., Any], specs: Sequence[Any], name: str) -> Any:
    """Exports ``function`` at ``specs`` for platform "tpu", under the current device context.

    Needs no libtpu. Forward compatibility is switched off, as torch_tpu does for its own kernels: the module is used at
    once, by the libtpu beside it. The machine code that libtpu makes of it is, byte for byte, that of lowering for the
    topology itself (tests/test_compile_roads.py).

    Args:
        function: A JAX callable.
        specs: What it takes: arrays or ``jax.ShapeDtypeStruct``.
        name: The module's name.

    Returns:
        A ``jax.export.Exported``; ``mlir_module_serialized`` is what the device and the compile worker take.
    """
    import jax
    from jax import export
    from jax._src import config

    with config.export_ignore_forward_compatibility(True):
        return export.export(
            jax.jit(retraced(function, name), keep_unused=True),
            platforms=["tpu"],
            disabled_checks=[export.DisabledSafetyCheck.custom_call("ALL")],
        )(*specs)


# --- jaxprs ----------------------------------------------------------------------------------------------------------


def jaxpr_of(function: Callable[..., Any], specs: Sequence[Any]) -> Any:
    """Traces ``function`` afresh and returns its closed jaxpr."""
    import jax

    return jax.make_jaxpr(retraced(function, "traced"))(*specs)


def inner_jaxprs(value: Any) -> Iterator[Any]:
    """Yields the jaxprs held by a parameter of an equation (pjit, scan, cond, custom_vjp, remat, shard_map, ...)."""
    from jax.extend import core

    if isinstance(value, core.ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from inner_jaxprs(item)


def block_dim(dim: Any) -> tuple[int | None, bool]:
    """Returns a block dimension's size (None: squeezed), and whether its index counts elements rather than blocks."""
    from jax._src.pallas import core

    if isinstance(dim, core.Squeezed) or dim is None:
        return None, False
    if isinstance(dim, int):
        return dim, False
    return int(dim.block_size), isinstance(dim, core.Element | core.BoundedSlice)


def grid_dim(dim: Any) -> int | None:
    """Returns a grid dimension's size, or None if it is only known on the device."""
    return dim if isinstance(dim, int) else None


def index_function(index_map: Any) -> Callable[..., tuple[Any, ...]]:
    """Returns an index map as a JAX function of the grid indices and the scalar-prefetch tables, all as plain arrays."""
    from jax._src.state import discharge
    from jax.extend import core

    pure = discharge.discharge_state(index_map)
    return lambda *values: tuple(core.jaxpr_as_fun(pure)(*values)[: len(index_map.jaxpr.outvars)])


def read_indices(equation: Any) -> tuple[Any, ...]:
    """Returns what a ``get`` equation of an index map indexes its table with: variables, literals or numbers."""
    import jax

    indexers = jax.tree.unflatten(equation.params["tree"], equation.invars[1:])
    return tuple(index for indexer in indexers for index in indexer.indices)


# --- texts -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomCall:
    """One Mosaic custom call of a module.

    Attributes:
        name: The kernel's name.
        mosaic: Its body as readable Mosaic MLIR, without locations.
        settings: The rest of its backend config (VMEM limit, flags, cost estimate).
    """

    name: str
    mosaic: str
    settings: Mapping[str, Any]


def module_texts(module: bytes) -> tuple[str, tuple[CustomCall, ...]]:
    """Returns a serialized module as readable StableHLO, and its Mosaic custom calls in order.

    Neither has locations, so neither depends on where the source stands. In the StableHLO a kernel's body is replaced by
    ``<mosaic N>``, N its place among the calls.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax
    from jaxlib.mlir import ir

    calls: list[CustomCall] = []

    def visit(op: Any) -> Any:
        if op.name == "stablehlo.custom_call" and ir.StringAttr(op.attributes["call_target_name"]).value == "tpu_custom_call":
            config = json.loads(ir.StringAttr(op.attributes["backend_config"]).value)
            body = config["custom_call_config"].pop("body")
            name = ir.StringAttr(op.attributes["kernel_name"]).value if "kernel_name" in op.attributes else "kernel"
            calls.append(CustomCall(name=name, mosaic=_mosaic_text(base64.b64decode(body)), settings=config))
            config["custom_call_config"]["body"] = f"<mosaic {len(calls) - 1}>"
            op.attributes["backend_config"] = ir.StringAttr.get(json.dumps(config, sort_keys=True))
            del config["custom_call_config"]["body"]
        return ir.WalkResult.ADVANCE

    with mlir.make_ir_context():
        parsed = _jax.mlir.deserialize_portable_artifact(module)
        parsed.operation.walk(visit)
        return parsed.operation.get_asm(enable_debug_info=False), tuple(calls)


def _mosaic_text(body: bytes) -> str:
    """Turns the versioned bytecode inside a custom call back into the Mosaic dialects."""
    from jax._src.interpreters import mlir
    from jax._src.lib import tpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.passmanager import PassManager

    context = mlir.make_ir_context()
    tpu.register_dialect(context)
    with context, ir.Location.unknown():
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(body)
        PassManager.parse("builtin.module(mosaic-serde{serialize=false})").run(module.operation)
        return str(module.operation.get_asm(enable_debug_info=False))


_WINDOW = re.compile(r"%arg\d+: memref<((?:\d+x)*)[a-z]+(\d+)\w*, (?:[^<>]*, )?#tpu\.memory_space<vmem>>")


def window_bytes(mosaic: str) -> int:
    """Returns the VMEM that a Mosaic kernel cannot do without: each window and scratch array once, without padding.

    A pipeline holds most windows twice; but an array that is small enough may lie in VMEM as a whole, without windows.
    """
    head = next((line for line in mosaic.splitlines() if "func.func @" in line), "")
    return sum(math.prod(int(n) for n in m[1].split("x") if n) * int(m[2]) // 8 for m in _WINDOW.finditer(head))


# --- compiling: only in the worker, loads libtpu ---------------------------------------------------------------------


def topology_device(topology: str) -> Any:
    """Returns the first device of a described topology. Loads libtpu."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]


def compile_module(module: bytes, device: Any, options: Mapping[str, Any]) -> tuple[int, bytes]:
    """Compiles a serialized module for ``device``.

    Returns:
        The size of the generated code in bytes, and the serialized executable.
    """
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import _jax

    with mlir.make_ir_context():
        parsed = _jax.mlir.deserialize_portable_artifact(module)
        compile_options = compiler.get_compile_options(
            num_replicas=1, num_partitions=1, device_assignment=[0], env_options_overrides=dict(options)
        )
        executable = device.client.compile(
            parsed, executable_devices=_jax.DeviceList((device,)), compile_options=compile_options
        )
    return executable.get_compiled_memory_stats().generated_code_size_in_bytes, executable.serialize()


def scoped_vmem_bytes(executable: bytes) -> int:
    """Returns the most VMEM that a Mosaic kernel of a serialized executable has on its stack.

    libtpu writes what it allocated (windows with their buffers, scratch, Mosaic's own temporaries and spills) into the
    backend config of each custom call, as ``used_scoped_memory_configs`` with memory space 1. The text is searched for in
    the serialized bytes, because jaxlib 0.10.2 cannot parse the HLO of programs with asynchronous copies back.
    """
    most = 0
    start = 0
    for found in re.finditer(rb'"used_scoped_memory_configs":\[(.*?)\]', executable):
        if b'"custom_call_config":{"body":"' in executable[start : found.start()]:  # else one of XLA's own fusions
            sizes = re.findall(rb'"memory_space":"1"[^}]*"size":"(\d+)"', found.group(1))
            most = max(most, *map(int, sizes), 0)
        start = found.end()
    return most


# --- Pallas' TPU interpreter, watched --------------------------------------------------------------------------------


class InterpreterWatch(Protocol):
    """What `watched_interpreter` tells. Calls come from the threads that simulate the devices."""

    def started(self, memory: Any) -> None:
        """A kernel begins: its simulated memory, the interpreter's own object."""

    def read(self, key: tuple[str, int, int, int], content: Any, source: str | None) -> None:
        """A buffer (memory space, number, device, core) was read, by the line `source` of a body or to move a block."""

    def waits(self, semaphore: Any, value: int, core: int, source: str | None) -> contextlib.AbstractContextManager[None]:
        """A core waits on a semaphore inside this context."""

    def failed(self, exception: Exception) -> None:
        """A device failed."""

    def printed(self, text: str) -> None:
        """The interpreter found a race, or a semaphore that is not zero at the end of a kernel."""


@contextlib.contextmanager
def watched_interpreter(watch: InterpreterWatch) -> Iterator[None]:
    """Makes kernels that run under the TPU interpreter report to `watch`. Process-wide: one at a time.

    The interpreter's state is reset on both ends; a failed run leaves it unusable otherwise.
    """
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call, race_detection_state, shared_memory

    class Memory(shared_memory.SharedMemory):
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            watch.started(self)

        def get_buffer_content(self, key: Any, *args: Any, logging_info: Any = None, **keywords: Any) -> Any:
            found = super().get_buffer_content(key, *args, **(keywords | {"logging_info": logging_info}))
            watch.read(key, found[0], _line(logging_info))
            return found

        def set_failed(self, exception: Exception, *args: Any, **keywords: Any) -> None:
            watch.failed(exception)
            super().set_failed(exception, *args, **keywords)

    class Semaphore(shared_memory.Semaphore):
        def wait(self, value: Any, global_core_id: Any, *, logging_info: Any = None, **keywords: Any) -> None:
            with watch.waits(self, int(value), int(global_core_id), _line(logging_info)):
                super().wait(value, global_core_id, logging_info=logging_info, **keywords)

    swapped: list[tuple[Any, str, Any]] = [
        (shared_memory, "SharedMemory", Memory),
        (shared_memory, "Semaphore", Semaphore),
        (race_detection_state, "print", watch.printed),
        (interpret_pallas_call, "print", watch.printed),
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(interpret_pallas_call.reset_tpu_interpret_mode_state)
        interpret_pallas_call.reset_tpu_interpret_mode_state()
        for module, name, value in swapped:
            if name in vars(module):
                stack.callback(setattr, module, name, getattr(module, name))
            else:  # `print` is a builtin there
                stack.callback(delattr, module, name)
            setattr(module, name, value)
        yield


def _line(logging_info: Any) -> str | None:
    """Returns "file:line (function)" of what the interpreter is executing, None if it is not a kernel's body."""
    if logging_info is None or logging_info.source_info is None:
        return None
    text = str(logging_info.get_source_info_str())
    return None if text == "unknown" else text


def source_line(eqn: Any) -> str:
    """Returns "file:line (function)" of the user's code behind an equation."""
    from jax._src import source_info_util

    return str(source_info_util.summarize(eqn.source_info))


def interpreter_effects(interpret: Any) -> frozenset[Any]:
    """Returns the effects that a `pallas_call` has with this `interpret`."""
    from jax._src.pallas import core as pallas_core

    return frozenset(pallas_core.get_interpret_effects(interpret))


def parallel_order(grid: Sequence[int], compiler_params: Any, seed: int) -> tuple[tuple[int, ...], ...]:
    """Returns the order in which the TPU interpreter visits each parallel dim of a grid; empty for the other dims."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    found = interpret_pallas_call._get_randomized_grid_coordinates(tuple(grid), compiler_params, seed)
    return tuple(tuple(int(i) for i in dim) for dim in found)
