"""Every private name of torch_tpu that tpukern uses, and nothing else.

torch_tpu 0.2.0 has no public way to start its device on another PJRT plugin, or to register a lowered kernel once and call it
cheaply. `missing_names` says which of the names below are gone; the tests assert that it is empty for the pinned version.

For the dispatch module:
    register_custom_kernel(name, fingerprint, serialized, *, function=None)
        once per (kernel, shapes, config). ``serialized`` is ``jax.export.Exported.mlir_module_serialized`` for platform "tpu".
        ``function``, the JAX callable behind it (tensors in, tuple out), is what the public ``jax_op`` wraps where the
        private entry points are not the known ones.
    call_custom_kernel(name, fingerprint, inputs, outputs) -> list of tensors
        ``outputs`` are tensors of the result shapes and dtypes (device meta will do). Strided and stride-0 inputs are accepted.
        The caller guards zero-size operands and is sure of the shapes: a wrong output shape aborts the process.
    fast_path() -> bool: whether these go to the private entry points.
    kernel_entry() -> KernelEntry: the same two functions without the look-up, for a hot path.

For the device module: `installed_version`, `is_loaded`, `check`, `load`, `initialize`, `registered_plugin`, `runtime_is_up`,
`quiet`.
"""

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import pathlib
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from tpukern.errors import DeviceError, OverrideError

KNOWN_VERSIONS = ("0.2.0",)
NON_LEAF_GRAD = r"The \.grad attribute of a Tensor that is not a leaf[\s\S]*torch_tpu"
INSTALL_COMMAND = "pip install 'tpukern[tpu]'"

_KERNELS = "torch_tpu._internal.pallas.tpu_torch_pallas"
_DEVICE_NAMES = {
    "torch_tpu._loader": ("_init_device",),
    "torch_tpu._internal.device._device_ops_backend": ("_is_initialized", "_is_in_bad_fork"),
}
_KERNEL_NAMES = {_KERNELS: ("register_custom_kernel", "call_custom_kernel", "lookup_custom_kernel")}

_XLA_LIBRARY = "csrc/common/libxla_base.so"
# C++ functions: StatusOr<PJRT_Api*> pjrt::PjrtApi(string_view), StatusOr<bool> pjrt::IsPjrtPluginInitialized(string_view).
_LOOK_UP_PLUGIN = "_ZN4pjrt7PjrtApiESt17basic_string_viewIcSt11char_traitsIcEE"
_PLUGIN_IS_UP = "_ZN4pjrt23IsPjrtPluginInitializedESt17basic_string_viewIcSt11char_traitsIcEE"
_SET_LOG_LEVEL = "_ZN4absl12lts_2026052614SetMinLogLevelENS0_18LogSeverityAtLeastE"
_PLUGIN_NAME = b"tpu"
_STATUS_OK = 1  # absl's inlined representation of an OK status
_LOG_ERRORS_ONLY = 2


def installed_version() -> str | None:
    """Returns the version of the installed torch_tpu, None without one. Does not import it."""
    try:
        return importlib.metadata.version("torch_tpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def is_loaded() -> bool:
    """Returns whether torch_tpu is in this process, by PyTorch's autoload or an import."""
    return "torch_tpu._loader" in sys.modules


def missing_names() -> tuple[str, ...]:
    """Returns the private names tpukern needs that this torch_tpu does not have. Loads it."""
    missing = []
    for module, names in (_DEVICE_NAMES | _KERNEL_NAMES).items():
        missing += [f"{module}.{name}" for name in names if not _has(module, name)]
    symbols = {
        "pjrt::PjrtApi": _LOOK_UP_PLUGIN,
        "pjrt::IsPjrtPluginInitialized": _PLUGIN_IS_UP,
        "absl::SetMinLogLevel": _SET_LOG_LEVEL,
    }
    missing += [f"libxla_base.so {name}" for name, symbol in symbols.items() if _function(symbol) is None]
    return tuple(missing)


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def check() -> None:
    """Checks that torch_tpu is there and of a kind that can be driven. Does not load it.

    Raises:
        DeviceError: It is not installed, or another PrivateUse1 backend has the place that it would take.
    """
    if installed_version() is None or importlib.util.find_spec("torch_tpu") is None:
        raise DeviceError("tpu", "torch_tpu is not installed", "torch_tpu, PyTorch's TPU backend", f"Run: {INSTALL_COMMAND}")
    torch = sys.modules.get("torch")
    name = torch._C._get_privateuse1_backend_name() if torch is not None else "privateuseone"
    if name not in ("privateuseone", "tpu"):
        raise DeviceError(
            "tpu",
            f"the backend {name!r} has PyTorch's PrivateUse1 place in this process",
            "a process in which only torch_tpu claims it",
            "Start the tpu device in a process of its own.",
        )


def load() -> None:
    """Imports torch_tpu. On a machine without a TPU that starts no device.

    Raises:
        DeviceError: It cannot be imported.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about their own deprecated calls, and about tcmalloc
            importlib.import_module("torch")
            importlib.import_module("torch_tpu._loader")
    except (ImportError, RuntimeError) as error:
        raise DeviceError(
            "tpu", f"torch_tpu {installed_version()} cannot be imported: {error}", "", f"Run: {INSTALL_COMMAND}"
        ) from error


def initialize() -> None:
    """Makes ``torch.device("tpu")`` known to PyTorch. The runtime itself starts at the first tensor.

    Raises:
        DeviceError: torch_tpu has not the entry point.
    """
    for module, names in _DEVICE_NAMES.items():
        for name in names:
            if not _has(module, name):
                raise DeviceError(
                    "tpu",
                    f"torch_tpu {installed_version()} has no {module}.{name}",
                    f"torch_tpu {' or '.join(KNOWN_VERSIONS)}",
                    f"Run: {INSTALL_COMMAND}",
                )
    with contextlib.redirect_stderr(io.StringIO()):
        importlib.import_module("torch_tpu._loader")._init_device("tpu")


def registered_plugin() -> int | None:
    """Returns the address of the PJRT_Api that the loaded torch_tpu found at import, None if it found none."""
    status, value = _status_or(_LOOK_UP_PLUGIN)
    return value if status == _STATUS_OK else None


def runtime_is_up() -> bool:
    """Returns whether the loaded torch_tpu has started its PJRT plugin, after which it can no longer be exchanged."""
    status, value = _status_or(_PLUGIN_IS_UP)
    return status == _STATUS_OK and bool(value & 0xFF)


def _status_or(symbol: str) -> tuple[int, int]:
    function = _function(symbol)
    if function is None:
        raise DeviceError(
            "tpu",
            f"torch_tpu {installed_version()} has no {symbol} in {_XLA_LIBRARY}",
            f"torch_tpu {' or '.join(KNOWN_VERSIONS)}",
            "Start Python with TORCH_DEVICE_BACKEND_AUTOLOAD=0.",
        )
    result = (ctypes.c_uint64 * 2)()  # absl::StatusOr: the status, then the value
    function(ctypes.byref(result), ctypes.c_size_t(len(_PLUGIN_NAME)), ctypes.c_char_p(_PLUGIN_NAME))
    return result[0], result[1]


def _function(symbol: str) -> Any:
    spec = importlib.util.find_spec("torch_tpu")
    if spec is None or spec.origin is None:
        return None
    try:
        function = getattr(ctypes.CDLL(str(pathlib.Path(spec.origin).parent / _XLA_LIBRARY)), symbol)
    except (OSError, AttributeError):
        return None
    function.restype = None
    return function


def quiet() -> None:
    """Keeps XLA's information lines off the terminal, also in a process that has loaded torch_tpu already."""
    function = _function(_SET_LOG_LEVEL)
    if function is not None:
        function(ctypes.c_int(_LOG_ERRORS_ONLY))


def hush() -> None:
    """Silences the warning about ``.grad`` that torch_tpu 0.2.0 causes, and no user, by reading a result that requires grad.

    The message names the header it came from; one that PyTorch itself was built with is left alone.
    """
    warnings.filterwarnings("ignore", message=NON_LEAF_GRAD, category=UserWarning)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelEntry:
    """How lowered kernels reach the device.

    Attributes:
        register: ``register(name, fingerprint, serialized, function)``.
        call: ``call(name, fingerprint, inputs, outputs) -> list of tensors``.
        prepared: ``prepared(name, fingerprint, outputs, tally)(inputs)`` is the same, as the tensor or a tuple of them, and
            counts itself in ``tally.calls``: one function with the fewest steps, since it is on the way of every call.
        fast: Whether these are torch_tpu's private entry points rather than its public ``jax_op``.
    """

    register: Callable[[str, str, bytes, Callable[..., Any] | None], None]
    call: Callable[[str, str, Sequence[Any], Sequence[Any]], list[Any]]
    prepared: Callable[[str, str, Sequence[Any], Any], Callable[[Sequence[Any]], Any]]
    fast: bool


@functools.cache
def kernel_entry() -> KernelEntry:
    """Returns the private entry points if they are the known ones, else the slower public road."""
    known = installed_version() in KNOWN_VERSIONS and all(_has(_KERNELS, name) for name in _KERNEL_NAMES[_KERNELS])
    return _private_entry() if known else _public_entry()


def _private_entry() -> KernelEntry:
    module = importlib.import_module(_KERNELS)
    native_register, native_call = module.register_custom_kernel, module.call_custom_kernel

    def register(name: str, fingerprint: str, serialized: bytes, function: Callable[..., Any] | None = None) -> None:
        native_register(name, fingerprint, serialized_mlir_module=serialized)

    def call(name: str, fingerprint: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        return native_call(name, fingerprint, inputs=inputs, output_shapes=outputs)

    def prepared(name: str, fingerprint: str, outputs: Sequence[Any], tally: Any) -> Callable[[Sequence[Any]], Any]:
        def one(inputs: Sequence[Any]) -> Any:
            tally.calls += 1
            return native_call(name, fingerprint, inputs=inputs, output_shapes=outputs)[0]

        def several(inputs: Sequence[Any]) -> Any:
            tally.calls += 1
            return tuple(native_call(name, fingerprint, inputs=inputs, output_shapes=outputs))

        return one if len(outputs) == 1 else several

    return KernelEntry(register=register, call=call, prepared=prepared, fast=True)


def _public_entry() -> KernelEntry:
    operators: dict[tuple[str, str], Callable[..., Any]] = {}

    def register(name: str, fingerprint: str, serialized: bytes, function: Callable[..., Any] | None = None) -> None:
        if function is None:
            raise OverrideError(
                name,
                f"torch_tpu {installed_version()} takes no lowered kernels",
                f"torch_tpu {' or '.join(KNOWN_VERSIONS)}, or the JAX function",
                f"Run: {INSTALL_COMMAND}",
            )
        operators[name, fingerprint] = function

    def call(name: str, fingerprint: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        function = operators[name, fingerprint]
        operator = _public_operator(function, f"{_identifier(name)}_{_identifier(fingerprint)}", len(inputs), len(outputs))
        results = operator(*inputs)
        return list(results) if isinstance(results, tuple | list) else [results]

    def prepared(name: str, fingerprint: str, outputs: Sequence[Any], tally: Any) -> Callable[[Sequence[Any]], Any]:
        def run(inputs: Sequence[Any]) -> Any:
            tally.calls += 1
            results = call(name, fingerprint, inputs, outputs)
            return results[0] if len(results) == 1 else tuple(results)

        return run

    return KernelEntry(register=register, call=call, prepared=prepared, fast=False)


def _identifier(text: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in text)


@functools.cache
def _public_operator(function: Callable[..., Any], name: str, inputs: int, outputs: int) -> Callable[..., Any]:
    jax, torch = importlib.import_module("jax"), importlib.import_module("torch")

    def positional(*arrays: Any) -> Any:
        results = function(*arrays)
        return results[0] if outputs == 1 and isinstance(results, tuple | list) else results

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    positional.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(f"x{index}", kind, annotation=jax.Array) for index in range(inputs)],
        return_annotation=jax.Array if outputs == 1 else tuple[(jax.Array,) * outputs],  # type: ignore[misc]
    )
    operator: Callable[..., Any] = torch.tpu.pallas.jax_op(f"tpukern_public::{name}", positional)
    return operator


_EXECUTION = "torch_tpu._internal.execution_mode.execution_mode_impl"


@functools.cache
def _compile_mode() -> tuple[Callable[[], Any], Any] | None:
    if not (_has(_EXECUTION, "_get_eager_mode") and _has(_EXECUTION, "_EagerMode")):
        return None
    module = importlib.import_module(_EXECUTION)
    mode = getattr(module._EagerMode, "INTERNAL_COMPILE_FX_GRAPH", None)
    return None if mode is None else (module._get_eager_mode, mode)


def may_be_compiling() -> bool:
    """Returns whether torch.compile may be running the code that asks, to make a graph of it.

    A tensor that such code returns has to be made by it: torch_tpu ends the process over one that has been computed before.
    """
    known = _compile_mode()
    return known is None or known[0]() == known[1]


def fast_path() -> bool:
    """Returns whether kernels go to torch_tpu's private entry points."""
    return kernel_entry().fast


def register_custom_kernel(
    name: str, fingerprint: str, serialized: bytes, *, function: Callable[..., Any] | None = None
) -> None:
    """Makes a lowered kernel known to torch_tpu under (name, fingerprint).

    Args:
        name: Shown in profiles.
        fingerprint: Tells kernels of one name apart; of the shapes, dtypes, config and lowered text.
        serialized: ``jax.export.Exported.mlir_module_serialized``, exported for platform "tpu" with ``keep_unused=True``.
        function: The JAX callable behind it, needed only by the public road.
    """
    kernel_entry().register(name, fingerprint, serialized, function)


def call_custom_kernel(name: str, fingerprint: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Calls a registered kernel; see the module's docstring for what the caller owes.

    Args:
        inputs: Tensors on ``tpu``, in operand order.
        outputs: Tensors of the result shapes and dtypes, of any device.

    Returns:
        The results, contiguous.
    """
    return kernel_entry().call(name, fingerprint, inputs, outputs)
