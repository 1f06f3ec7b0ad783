"""Every private or fragile Helion name that tpukern relies on, and how Helion is brought up.

``load()`` is the way to Helion: it checks the version. Helion generates the Pallas code; it never runs anything here. Its
launchers are replaced by ``_launch``, which makes one ``pallas_call`` of the generated body, block specs and scratch, so that
all that reads jaxprs sees grid and blocks, and so that one trace serves the device, the compiler and both interpreters.

Helion keeps state per process (compile environments, a VMEM limit, outputs cached on the generated functions): ``_LOCK``.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import inspect
import logging
import re
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from tpukern.errors import ConfigError, LowerError, SignatureError, TpukernError
from tpukern.targets import TARGETS, Target

TESTED: Final = ("1.5.1",)
INSTALL: Final = "pip install 'tpukern[helion]'"
LISTS: Final = (  # of Helion's config: one entry for each loop, load or reduction
    "block_sizes",
    "loop_orders",
    "flatten_loops",
    "reduction_loops",
    "pallas_load_buffer_count",
    "l2_groupings",
    "range_unroll_factors",
    "range_num_stages",
    "range_multi_buffers",
    "range_flattens",
    "range_warp_specializes",
    "static_ranges",
    "num_threads",
    "load_eviction_policies",
    "load_cache_modifiers",
    "store_cache_modifiers",
    "indexing",
    "atomic_indexing",
)
SHORT: Final = tuple(name[:-1] for name in LISTS[:12] if name != "pallas_load_buffer_count")  # a list of one
_LOCK: Final = threading.RLock()
_DEFAULT_CHIP: Final = TARGETS["v5e"]  # what is traced for where no chip is named: it has the strictest layouts


def installed() -> str | None:
    """Returns the version of the installed Helion, from its metadata: loads nothing."""
    try:
        return importlib.metadata.version("helion")
    except importlib.metadata.PackageNotFoundError:
        return None


def missing() -> str | None:
    """Returns why Helion cannot be used, or None if it can: loads nothing."""
    version = installed()
    if version is None:
        return "helion is not installed"
    return None if version in TESTED else f"helion {version} is not a version that was tested: {', '.join(TESTED)}"


@functools.cache
def load() -> types.ModuleType:
    """Imports Helion and checks its version and that the private names used here are there.

    Raises:
        ConfigError: It is missing, another version, or lacks a name.
    """
    version, tested = installed(), ", ".join(TESTED)
    if version is None:
        raise ConfigError("helion", "helion is not installed", f"helion {tested}, which was tested", INSTALL)
    if version not in TESTED:
        raise ConfigError("helion", f"helion {version}", f"helion {tested}, which was tested", INSTALL)
    import helion
    import helion.language

    broken = [name for name, check in private_names().items() if not check()]
    if broken:
        raise ConfigError("helion", f"helion {version} has no {broken[0]}", f"the private names of helion {tested}", INSTALL)
    return helion


def private_names() -> dict[str, Callable[[], bool]]:
    """Returns a check for every private name used in this module, by what it is called."""

    def attribute(module: str, *names: str) -> Callable[[], bool]:
        def check() -> bool:
            try:
                found: Any = importlib.import_module(module)
                for name in names:
                    found = getattr(found, name)
            except (ImportError, AttributeError):
                return False
            return True

        return check

    import importlib

    launcher, runtime = "helion.runtime.pallas.launcher", "helion.runtime.kernel"
    wanted = [
        (launcher, "_CACHED_VMEM_LIMIT_BYTES"),
        (launcher, "_pallas_prepare_args"),
        (launcher, "_pallas_shared_output_plan"),
        (launcher, "_pallas_build_scratch_shapes"),
        (launcher, "_pallas_build_pipeline_specs"),
        (launcher, "_pallas_build_block_specs"),
        (launcher, "_pallas_make_block_spec"),
        (launcher, "_pallas_make_reordered_kernel"),
        (launcher, "_pallas_scalar_prefetch_jit_fn"),
        (launcher, "_pallas_jax_call"),
        ("helion.runtime.pallas.jax_export", "_JaxExportTensor", "from_jax"),
        (runtime, "Kernel", "bind"),
        (runtime, "BoundKernel", "compile_config"),
        (runtime, "BoundKernel", "to_code"),
        (runtime, "BoundKernel", "config_spec"),
        ("helion.autotuner.config_spec", "ConfigSpec", "default_config"),
        ("helion.autotuner.config_spec", "ConfigSpec", "normalized_config"),
        ("helion.autotuner.config_spec", "ConfigSpec", "_flat_fields"),
        ("helion._compiler.pallas.backend", "PallasBackend", "map_dot_precision"),
        ("helion.exc", "Base"),
        ("helion.exc", "InvalidConfig"),
        ("helion.exc", "TensorOperationInWrapper"),
        ("helion.language", "constexpr"),
    ]
    return {".".join(path): attribute(*path) for path in wanted}


# --- kernels ---------------------------------------------------------------------------------------------------------


def is_helion(value: Any) -> bool:
    """Whether a value is a `helion.kernel`."""
    return any(base.__module__ == "helion.runtime.kernel" and base.__name__ == "Kernel" for base in type(value).__mro__)


def uses_helion(function: Any) -> bool:
    """Whether a function's body uses `helion.language`, imported under whatever name, or under TYPE_CHECKING as `hl`."""
    code, known = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None:
        return False
    for name in code.co_names:
        found = getattr(known.get(name), "__name__", None)
        if found in ("helion", "helion.language") or (name == "hl" and name not in known):
            return True
    return False


def plain(value: Any) -> types.FunctionType:
    """Returns the function of a `helion.kernel`, or the function itself."""
    function: types.FunctionType = value.fn if is_helion(value) else value
    return function


def given_config(value: Any) -> dict[str, Any] | None:
    """Returns the config that a `helion.kernel` was declared with, if it is one."""
    configs = value.configs if is_helion(value) else ()
    return dict(configs[0].config) if configs else None


def make(name: str, value: Any, statics: Sequence[str], settings: Mapping[str, Any]) -> Any:
    """Returns a `helion.kernel` for the Pallas backend, whatever the environment says.

    Names that only the body uses (`torch`, `helion`, `hl`) may be imported under TYPE_CHECKING; they are filled in here.

    Args:
        name: The kernel's name.
        value: A function, or a `helion.kernel`, whose settings are kept.
        statics: Parameters that are constants of the generated code.
        settings: Helion's settings.

    Raises:
        ConfigError: Helion is missing or not a tested version, or does not have such a setting.
        LowerError: Helion refuses the function.
    """
    helion = load()
    import torch

    function = plain(value)
    for known, module in (("torch", torch), ("helion", helion), ("hl", helion.language)):
        if known in function.__code__.co_names:
            function.__globals__.setdefault(known, module)
    kept = value.settings.to_dict() if is_helion(value) else {}
    chosen = {
        **kept,
        "ignore_warnings": [helion.exc.TensorOperationInWrapper],
        **settings,
        "backend": "pallas",
        "static_shapes": True,
        "pallas_interpret": False,  # the code that is checked is the code that is compiled
    }
    with explained(name, function):
        try:
            made = helion.kernel(function, **chosen)
        except TypeError as error:
            found = f"Helion refuses its settings or parameters: {error}"
            raise ConfigError(name, found, "those of helion.Settings") from error
    for place, parameter in enumerate(made.signature.parameters):
        if parameter in statics:
            made._annotations[place] = helion.language.constexpr
    return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """A Helion kernel bound to shapes.

    Attributes:
        name: The kernel's name.
        function: Its function.
        bound: Helion's own object.
        blocks: For each block size: the names of its loop variable, its least and its largest value.
        highest: Whether products are of float32 in full. Helion's setting `dot_precision="ieee"` asks for it, which its Pallas
            backend does not heed; with 16-bit operands Mosaic does not take it.
    """

    name: str
    function: types.FunctionType
    bound: Any
    blocks: tuple[tuple[str, int, int], ...]
    highest: bool

    def default(self) -> dict[str, Any]:
        """Returns Helion's default config."""
        with explained(self.name, self.function):
            return dict(self.bound.config_spec.default_config().config)

    def normalized(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a config with everything in it that Helion adds.

        Raises:
            ConfigError: It is none of this kernel's.
        """
        if any(config.get("flatten_loops") or ()):  # found by verify: elements are counted, not blocks, so some are left out
            found = "flatten_loops is True"
            raise ConfigError(self.name, found, "False, since Helion's Pallas backend leaves blocks of ragged arrays out then")
        with explained(self.name, self.function):
            return dict(self.bound.config_spec.normalized_config(dict(config)).config)

    def choices(self) -> dict[str, Any]:
        """Returns for each key of Helion's config the values that its autotuner would try, a list of such for a list."""
        spec = self.bound.config_spec
        found: dict[str, Any] = {}
        for key, field in spec._flat_fields().items():
            kinds: list[Any] = []

            def note(fragment: Any, kinds: list[Any] = kinds) -> Any:
                kinds.append(_values(fragment))
                return fragment.default()

            default = field._flat_config(spec, note)
            if kinds and key != "flatten_loops":
                found[key] = kinds if key in LISTS and isinstance(default, list) else kinds[0]
        return found

    def source(self, config: Mapping[str, Any], target: Target | None) -> str:
        """Returns the Python that Helion generates."""
        with _LOCK, _for_chip(target, self.highest), explained(self.name, self.function):
            return str(self.bound.to_code(load().Config.from_dict(dict(config)), output_origin_lines=True))

    def run(
        self, config: Mapping[str, Any], arrays: Sequence[Any], interpret: Any, target: Target | None, vmem: int | None
    ) -> tuple[Any, ...]:
        """Runs the kernel on JAX arrays or tracers and returns what its function returns."""
        from tpukern.helion_host import HostMode, HostTensor, Unsupported, array_of

        limit = vmem or (target or _DEFAULT_CHIP).vmem_bytes
        settings = _Launching(name=self.name, interpret=interpret, vmem_bytes=limit, highest=self.highest)
        with _LOCK, _for_chip(target, self.highest), explained(self.name, self.function):
            run = self.bound.compile_config(load().Config.from_dict(dict(config)), allow_print=False)
            _forget_outputs(run)
            try:
                with HostMode():
                    given = [HostTensor(a) if hasattr(a, "dtype") else a for a in arrays]
                    results = run(*given, _launcher=functools.partial(_launch, settings))
            except Unsupported as error:
                raise LowerError(
                    self.name,
                    f"{error} outside of its hl.tile loops",
                    "sizes, views, new tensors, sums and elementwise operations there",
                    "Move it into a loop, or out of the kernel.",
                    target=target.name if target else None,
                ) from error
            finally:
                _forget_outputs(run)
        return tuple(array_of(r) for r in (results if isinstance(results, tuple | list) else (results,)))


def _values(fragment: Any) -> tuple[Any, ...]:
    """Returns what a fragment of Helion's config space ranges over; its default alone if that cannot be listed."""
    import itertools

    length = int(getattr(fragment, "length", None) or 0)
    if type(fragment).__name__ == "PermutationFragment" and length <= 4:
        return tuple(list(order) for order in itertools.permutations(range(length)))
    if type(fragment).__name__ == "ListOf":
        return tuple([value] * fragment.length for value in _values(fragment.inner))
    listed = fragment.search_values()
    return tuple(listed) if listed else (fragment.default(),)


def bind(name: str, kernel: Any, arguments: Sequence[Any], target: Target | None) -> Form:
    """Binds a `helion.kernel` to shapes.

    Args:
        name: The kernel's name.
        kernel: What `make` returned.
        arguments: In the order of its parameters; `jax.ShapeDtypeStruct` for tensors.
        target: The chip whose limits Helion is to see.

    Raises:
        LowerError: Helion cannot express the function, with the user's line.
    """
    load()
    import torch
    from helion.runtime.pallas.jax_export import _JaxExportTensor

    cpu = torch.device("cpu")
    given = tuple(_JaxExportTensor.from_jax(a, device=cpu) if hasattr(a, "dtype") else a for a in arguments)
    with _LOCK, _for_chip(target), explained(name, kernel.fn):
        bound = kernel.bind(given)
        env = bound.env
        blocks: list[tuple[str, int, int]] = []
        for spec in bound.config_spec.block_sizes:
            names = sorted(env.block_sizes[spec.block_id].debug_names)
            blocks.append((names[0] if names else str(len(blocks)), spec.min_size, spec.max_size))
    floats = [str(a.dtype) for a in arguments if hasattr(a, "dtype") and "float" in str(a.dtype)]
    highest = kernel.settings.dot_precision == "ieee" and all(dtype == "float32" for dtype in floats)
    return Form(name=name, function=kernel.fn, bound=bound, blocks=tuple(blocks), highest=highest)


@contextlib.contextmanager
def _for_chip(target: Target | None, highest: bool = False) -> Iterator[None]:
    """Lets Helion and Pallas ask for a chip where JAX only has a CPU: its VMEM, and `get_tpu_info`; and states `highest`."""
    from helion._compiler.pallas.backend import PallasBackend
    from helion.runtime.pallas import launcher

    from tpukern import jax_adapter

    chip = target or _DEFAULT_CHIP
    before = launcher._CACHED_VMEM_LIMIT_BYTES
    launcher._CACHED_VMEM_LIMIT_BYTES = chip.vmem_bytes
    precision = PallasBackend.__dict__["map_dot_precision"]
    if highest:
        PallasBackend.map_dot_precision = staticmethod(lambda _: "highest")
    try:
        with jax_adapter.cpu_as(chip):
            yield
    finally:
        launcher._CACHED_VMEM_LIMIT_BYTES = before
        PallasBackend.map_dot_precision = precision


def _forget_outputs(run: Any) -> None:
    """Drops the outputs that generated code keeps on its functions: they may be tracers of a trace that is over."""
    for value in list(run.__globals__.values()):
        if isinstance(value, types.FunctionType):
            for name in [n for n in vars(value) if n.startswith("_helion_output_meta_cache")]:
                delattr(value, name)


# --- launching -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Launching:
    """How the `pallas_call`s of one trace are made."""

    name: str
    interpret: Any
    vmem_bytes: int
    highest: bool


def _launch(how: _Launching, body: Any, grid: Sequence[int], *args: Any, **keywords: Any) -> Any:
    """Stands in for Helion's launcher: the generated code calls it with what it would launch."""
    from tpukern.helion_host import HostTensor, array_of

    outputs = list(keywords.get("_output_indices") or [])
    in_place = list(keywords.get("_inplace_indices") or [])
    arrays = _padded([array_of(a) for a in args], keywords.get("_ds_pad_dims") or ())
    if keywords.get("_compact_build_worklist") is not None:
        results = _worklist(how, body, grid, arrays, keywords)
    else:
        results = _one_call(how, body, tuple(int(n) for n in grid), arrays, keywords)
    fresh = []
    for at, result in zip(outputs, results, strict=True):
        result = result[tuple(slice(0, n) for n in args[at].shape)]
        if at in in_place and isinstance(args[at], HostTensor):
            args[at].write(result)
        else:
            fresh.append(HostTensor(result))
    if not fresh:
        fresh = [HostTensor(args[at].array) for at in outputs]
    return fresh[0] if len(fresh) == 1 else tuple(fresh)


def _padded(arrays: list[Any], pads: Sequence[tuple[int, int, int, int]]) -> list[Any]:
    """Pads arrays that the body slices by itself to whole blocks."""
    import jax.numpy as jnp

    for at, dim, block, extra in pads:
        array = arrays[at]
        more = (-array.shape[dim]) % block + extra
        if more:
            arrays[at] = jnp.pad(array, [(0, more if axis == dim else 0) for axis in range(array.ndim)])
    return arrays


def _one_call(how: _Launching, body: Any, grid: tuple[int, ...], arrays: list[Any], keywords: Mapping[str, Any]) -> list[Any]:
    import jax
    import jax.numpy as jnp
    from helion.runtime.pallas import launcher
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    outputs, in_place = list(keywords["_output_indices"] or []), list(keywords.get("_inplace_indices") or [])
    hbm, smem = list(keywords.get("_hbm_arg_indices") or []), keywords.get("_smem_arg_indices")
    info = keywords.get("_block_spec_info")
    inputs, output_only, others, count, places, aliased, shapes, aliases = launcher._pallas_prepare_args(
        tuple(arrays), outputs, in_place
    )
    guards, semantics = launcher._pallas_shared_output_plan(grid, inputs, output_only, outputs, aliased, info)
    scratch = launcher._pallas_build_scratch_shapes(pltpu, jnp, list(keywords.get("_scratch_shapes") or []))
    prefetched = keywords.get("_grid_scalar_prefetch_arg_indices") or []
    if prefetched:
        call = launcher._pallas_scalar_prefetch_jit_fn(
            pl, jnp, pltpu, body, grid, tuple(arrays), scalar_arg_indices=prefetched, tensor_arg_indices=inputs,
            output_only_indices=output_only, non_tensor_args=others, n_tensor_inputs=count, arg_to_tensor_pos=places,
            inplace_positions=aliased, output_indices=outputs, block_spec_info=info, smem_arg_indices=smem,
            scratch_shapes=scratch, out_shape_arg=shapes if len(shapes) > 1 else shapes[0], pallas_aliases=aliases,
            collective_id=None, use_low_level_scheduler=bool(keywords.get("_use_low_level_scheduler")),
            interpret=how.interpret,
        )  # fmt: skip
        results = call(*(arrays[at] for at in inputs))
        return list(results) if isinstance(results, tuple | list) else [results]
    if info is None or not grid:
        in_specs = [launcher._pallas_make_block_spec(pl, jnp, pltpu, arrays[at], None, False) for at in inputs]
        out_specs: Any = [launcher._pallas_make_block_spec(pl, jnp, pltpu, arrays[at], None, False) for at in outputs]
    elif hbm or scratch:
        in_specs, out_specs = launcher._pallas_build_pipeline_specs(
            pl, jnp, pltpu, grid, tuple(arrays), inputs, outputs, info, hbm, output_only, smem_arg_indices=smem
        )
    else:
        in_specs, out_specs = launcher._pallas_build_block_specs(
            pl, jnp, pltpu, grid, tuple(arrays), inputs, outputs, info, smem, output_only
        )
    reordered = launcher._pallas_make_reordered_kernel(
        body, tuple(arrays), inputs, others, count, outputs, aliased, places, n_extra_refs=len(scratch),
        skip_inplace_copy=set(hbm), _smem_arg_indices=smem, _copy_guards=guards,
    )  # fmt: skip
    in_hbm = {place: out for place, out in aliases.items() if outputs[out] in hbm}
    flags = {"XLA_TPU_FORCE_LP_LLO_SCHEDULER": True} if keywords.get("_use_low_level_scheduler") else None
    # Index arithmetic of generated code is of 32 bits. Products that state no precision get the kernel's.
    with jax.enable_x64(False), jax.default_matmul_precision("highest" if how.highest else "default"):
        results = pl.pallas_call(
            _with_filled_tails(reordered, in_specs, [arrays[at].shape for at in inputs], len(grid or (1,))),
            grid=grid or (1,),
            in_specs=in_specs,
            out_specs=list(out_specs) if isinstance(out_specs, tuple | list) else [out_specs],
            out_shape=list(shapes),
            scratch_shapes=scratch,
            input_output_aliases=in_hbm,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=tuple("arbitrary" if in_hbm else s for s in semantics) or ("arbitrary",),
                vmem_limit_bytes=how.vmem_bytes,
                flags=flags,
            ),
            interpret=how.interpret,
            name=how.name,
        )(*(arrays[at] for at in inputs))
    return list(results)


def _with_filled_tails(
    body: Callable[..., None], specs: Sequence[Any], shapes: Sequence[tuple[int, ...]], grid_rank: int
) -> Callable[..., None]:
    """Returns the body, run after zeros are stored past the end of the inputs whose last block is cut short.

    Generated code masks sums by multiplying with 0, which keeps the NaN that uninitialised memory may hold.
    """
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    cut = []  # operand, axis, last block, elements of it that are real
    for place, (spec, shape) in enumerate(zip(specs, shapes, strict=True)):
        for axis, (block, size) in enumerate(zip(spec.block_shape or (), shape, strict=False)):
            if isinstance(block, int) and size % block and size > block:
                cut.append((place, axis, size // block, size % block))
    if not cut:
        return body

    def run(*refs: Any) -> None:
        step = tuple(pl.program_id(axis) for axis in range(grid_rank))
        for place, axis, last, real in cut:

            @pl.when(specs[place].index_map(*step)[axis] == last)
            def _fill(ref: Any = refs[place], axis: int = axis, real: int = real) -> None:
                outside = (*(slice(None),) * axis, slice(real, ref.shape[axis]))
                shape = (*ref.shape[:axis], ref.shape[axis] - real, *ref.shape[axis + 1 :])
                ref[outside] = jnp.zeros(shape, ref.dtype)

        body(*refs)

    return run


def _worklist(how: _Launching, body: Any, grid: Any, arrays: list[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """Calls Helion's own launcher for kernels whose grid is a list of work that is made on the device."""
    from helion.runtime.pallas import launcher

    names: dict[str, Any] = {
        "build_worklist": None, "offset_arg_indices": [], "metadata_fields": [], "owner_ref_pos": 0, "num_scalar_prefetch": 0,
        "aligned_arg_indices": [], "tile_start_ref_pos": 1, "ordered_aligned_arg_indices": [], "range_start_ref_pos": -1,
        "ordered_window": 0,
    }  # fmt: skip
    compact = {name: keywords.get(f"_compact_{name}") or usual for name, usual in names.items()}
    compact["compact_block"] = keywords.get("_compact_block", 1)
    found: list[Any] = launcher._pallas_jax_call(
        body, grid, tuple(arrays), output_indices=list(keywords["_output_indices"]),
        inplace_indices=keywords.get("_inplace_indices"), block_spec_info=keywords.get("_block_spec_info"),
        scratch_shapes=keywords.get("_scratch_shapes"), hbm_arg_indices=keywords.get("_hbm_arg_indices"),
        smem_arg_indices=keywords.get("_smem_arg_indices"), collective_id=None, interpret=bool(how.interpret),
        compact=compact, return_all_outputs=True,
    )  # fmt: skip
    return found


# --- errors ----------------------------------------------------------------------------------------------------------

_WHERE: Final = re.compile(r"^Error in codegen for node \S+ \(.*? at 0x[0-9a-f]+>\): ")  # says nothing to the user
_WAYS_ROUND: Final = (  # what Helion's Pallas backend says, and what to do about it
    (re.compile(r"Move the ragged dimension"), ""),  # it says so itself
    (re.compile(r"int64|uint64|float64|64-bit"), "Cast to a 32-bit type before the call."),
    (re.compile(r"float16\b"), "Use bfloat16 or float32: the TPU has no float16."),
    (re.compile(r"[Cc]losure"), "Pass the value as an argument, or make it a global of the module."),
    (re.compile(r"rebinding|reassign|[Mm]utat"), "Give the value inside of the loop a name of its own."),
    (re.compile(r"DataDependentOutputShape|data.dependent", re.IGNORECASE), "Make the size an argument of the kernel."),
    (re.compile(r"vmem", re.IGNORECASE), "Choose smaller block sizes."),
)


@contextlib.contextmanager
def explained(name: str, function: Any) -> Iterator[None]:
    """Puts what Helion raises in our form, with the user's own line; the cause is kept."""
    logger = logging.getLogger("helion")
    before = logger.level
    logger.setLevel(logging.CRITICAL)  # it prints the config and a traceback before it raises
    try:
        yield
    except TpukernError:
        raise
    except Exception as error:
        if not type(error).__module__.startswith(("helion", "torch")) and not _inside_helion(error):
            raise
        raise _explanation(name, function, error) from error
    finally:
        logger.setLevel(before)


def _inside_helion(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and "/helion/" in trace.tb_frame.f_code.co_filename.replace("\\", "/")


def _explanation(name: str, function: Any, error: Exception) -> TpukernError:
    kind = type(error).__name__
    length = getattr(error, "base_msg_len", None)
    said = str(error)[:length] if length else str(error)
    said = " ".join(said.split("While processing:")[0].split()).rstrip(". ")
    said = _WHERE.sub("", said)
    place = _place(function, error)
    if kind in ("InvalidConfig", "ConfigSpecFragmentWithSymIntFailure"):
        return ConfigError(name, f"Helion refuses the config: {said}", "one of the kernel's own configs")
    if kind == "TypeError" and "argument" in said and not place:
        return SignatureError(name, said, "the function's own parameters")
    found = f"Helion's Pallas backend cannot express it: {kind}: {said}" if said else f"Helion raised {kind}"
    do = next((way for pattern, way in _WAYS_ROUND if pattern.search(f"{kind} {said}")), "")
    return LowerError(name, found + (f", at {place}" if place else ""), "a function that it can", do)


def _place(function: Any, error: BaseException) -> str:
    """Returns ``file:line`` of the user's code that an error is about; the function's own first line if nothing says it."""
    current: BaseException | None = error
    while current is not None:
        location = getattr(current, "location", None)
        if location is not None and getattr(location, "filename", None):
            return f"{location.filename}:{location.lineno}"
        named = re.search(r'File "([^"]+)", line (\d+)', str(current))
        if named and named[1] == function.__code__.co_filename:
            return f"{named[1]}:{named[2]}"
        current = current.__cause__ or current.__context__
    return f"{function.__code__.co_filename}:{inspect.unwrap(function).__code__.co_firstlineno}"
