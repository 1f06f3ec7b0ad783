"""Which ``tpu`` device this machine has, and starting it.

`kind` looks without touching anything: "tpu" (a chip that this process may open), "emulated" (torch_tpu and the CPU PJRT plugin
are installed) or "none". `start` makes ``torch.device("tpu")`` work and returns the kind. It may be called before or after
``import torch``, which loads torch_tpu by itself: as long as nothing has run on the device, the plugin torch_tpu chose is
exchanged for the CPU one.

``TPU_LIBRARY_PATH`` points at the CPU plugin only while torch_tpu is loaded and first used, since JAX reads it too.

Settings are left as torch_tpu has them. Eager ops run one by one; ``torch.tpu.eager_mode`` changes that, and its value
DEFER_NEVER_AND_LAUNCH_BLOCKING finds the op that fails. Beside CPU tensors, ``torch.set_num_threads(1)`` keeps PyTorch's
threads from fighting XLA's. A forked child raises at its first op on the device: use spawn.

Names for other modules: `kind`, `start`, `started`, `target`, `description`, `device_kind` (= `kind`).
"""

import importlib
import importlib.util
import pathlib
import threading
import warnings

from tpukern import emulated_ops, environment, pjrt_cpu, torch_tpu_adapter
from tpukern.errors import DeviceError
from tpukern.targets import TARGETS, Target

_GOOGLE = "0x1ae0"
# PCI device ids, as in JAX's hardware_utils.py and torch_tpu's hardware.py.
_CHIPS = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "v7x"}
_PCI = pathlib.Path("/sys/bus/pci/devices")
_DEV = pathlib.Path("/dev")
_ERRORS_ONLY = "2"  # TF_CPP_MIN_LOG_LEVEL

_lock = threading.Lock()
_started: str | None = None


def kind() -> str:
    """Returns "tpu", "emulated" or "none", touching no device and importing nothing heavy."""
    if _started is not None:
        return _started
    if chips():
        return "tpu"
    installed = torch_tpu_adapter.installed_version() is not None and pjrt_cpu.is_installed()
    return "emulated" if installed else "none"


device_kind = kind


def started() -> str | None:
    """Returns the kind that `start` started in this process, None before."""
    return _started


def chips() -> tuple[str, ...]:
    """Returns the target names of the TPU chips that this process could open, from the PCI bus and device files alone."""
    try:
        devices = sorted(_PCI.iterdir())
    except OSError:
        return ()
    return tuple(chip for device in devices if (chip := _chip(device)) is not None)


def _chip(device: pathlib.Path) -> str | None:
    try:
        if (device / "vendor").read_text().strip() != _GOOGLE:
            return None
        chip = _CHIPS.get((device / "device").read_text().strip())
    except OSError:
        return None
    return chip if chip and _is_exposed(device) else None


def _is_exposed(device: pathlib.Path) -> bool:
    try:
        group = (device / "iommu_group").readlink().name
        if (_DEV / "vfio" / group).exists():
            return True
    except OSError:
        pass
    return any(_DEV.glob("accel*"))  # the driver before VFIO


def target() -> Target | None:
    """Returns the chip of this machine; None on the emulated device, which is none of them."""
    if kind() != "tpu":
        return None
    found = chips()
    return TARGETS[found[0]] if found else None


def description() -> str:
    """Returns one line that says which device it is."""
    match kind():
        case "tpu":
            return f"a real TPU ({', '.join(chips())})"
        case "emulated":
            return "emulated: torch_tpu on XLA:CPU, no TPU in this machine"
        case _:
            return "none"


def start() -> str:
    """Makes ``torch.device("tpu")`` work in this process, once.

    Returns:
        "tpu" or "emulated".

    Raises:
        DeviceError: There is no TPU and no emulator, or the device was used on another plugin before.
    """
    global _started
    with _lock:
        if _started is None:
            found = kind()
            if found == "tpu":
                _start_real()
            else:
                _start_emulated()
                found = "emulated"
            _started = found
        return _started


def _start_real() -> None:
    torch_tpu_adapter.check()
    torch_tpu_adapter.load()
    torch_tpu_adapter.initialize()
    torch_tpu_adapter.hush()


def _start_emulated() -> None:
    path = pjrt_cpu.find_plugin()
    torch_tpu_adapter.check()
    wants_logs = environment.value("TF_CPP_MIN_LOG_LEVEL") == "0"  # importing JAX sets it to 1
    changes: dict[str, str | None] = {
        "TPU_LIBRARY_PATH": str(path),
        "XLA_FLAGS": emulated_ops.xla_flags(environment.value("XLA_FLAGS")),
    }
    with environment.changed(changes | ({} if wants_logs else {"TF_CPP_MIN_LOG_LEVEL": _ERRORS_ONLY})):
        plugin = pjrt_cpu.patched_plugin()
        torch_tpu_adapter.load()
        if not wants_logs:
            torch_tpu_adapter.quiet()
        _use_plugin(plugin)
        torch_tpu_adapter.initialize()
        _first_use()
    torch_tpu_adapter.hush()
    emulated_ops.install()


def _use_plugin(plugin: pjrt_cpu.Plugin) -> None:
    """Exchanges the plugin if torch_tpu was loaded before us and took libtpu."""
    registered = torch_tpu_adapter.registered_plugin()
    if registered == plugin.api:
        return
    late = "Call tpukern.enable() before the first use of the tpu device, or start Python with TORCH_DEVICE_BACKEND_AUTOLOAD=0."
    if registered is None or torch_tpu_adapter.runtime_is_up():
        found = (
            "torch_tpu was loaded without a PJRT plugin" if registered is None else "torch_tpu already runs on another plugin"
        )
        raise DeviceError("tpu", found, "a torch_tpu whose device has not been used", late)
    if not pjrt_cpu.redirect(registered, plugin.api, torch_tpu_adapter.registered_plugin):
        raise DeviceError("tpu", "torch_tpu was loaded on libtpu before and its choice cannot be changed", "", late)


def _first_use() -> None:
    torch = importlib.import_module("torch")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*XLA_FLAGS environment variable is an experimental feature")
        total = torch.ones(2, device="tpu").sum().item()
    if total != 2.0:
        raise DeviceError("tpu", "the emulated device adds wrongly", "1 + 1 = 2", f"Run: {pjrt_cpu.INSTALL_COMMAND}")
