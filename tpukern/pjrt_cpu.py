"""XLA:CPU behind the face of a TPU: the CPU PJRT plugin's API table, patched in this process's memory.

torch_tpu talks to its device through the PJRT C API, so a CPU plugin can stand in for libtpu. Two things are missing from it:
torch_tpu asks for a client with the option ``premapped_buffer_size``, which the CPU client refuses, and it counts chips through
the TpuTopology extension, which only libtpu has. `patched_plugin` loads the plugin and amends the table its ``GetPjrtApi``
returns: ``PJRT_Client_Create`` drops that option and asks for one device instead of four, and a TpuTopology extension of one
process, chip and core is put before the plugin's own extensions. Nothing on disk changes and no compiler is needed.

The structs follow ``xla/pjrt/c/pjrt_c_api.h`` and ``pjrt_c_api_tpu_topology_extension.h`` of OpenXLA as of PJRT C API 0.115
(the plugin) and 0.116 (libtpu 0.0.51). A plugin of another version is refused, not guessed at.

Names for the device module: `find_plugin`, `patched_plugin`, `redirect`, `PLUGIN_PACKAGE`, `PLUGIN_VERSION`, `INSTALL_COMMAND`.
"""

import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util
import mmap
import os
import pathlib
import platform
from collections.abc import Callable, Iterator
from typing import Any

from tpukern.errors import DeviceError

PLUGIN_PACKAGE = "lammps-jax-pjrt-cpu"
PLUGIN_VERSION = "0.11.2"
INSTALL_COMMAND = "pip install 'tpukern[emulator]'"

_PLUGIN_MODULE = "lammps_jax_pjrt_cpu"
_PLUGIN_FILE = "pjrt_c_api_cpu_plugin.so"
_API_VERSION = (0, 115)
_API_BYTES = 1144
_TPU_TOPOLOGY = 16  # PJRT_Extension_Type_TpuTopology
_REFUSED_OPTION = b"premapped_buffer_size"
_DEVICE_COUNT = b"cpu_device_count"
_INT64 = 1  # PJRT_NamedValue_kInt64


class _Extension(ctypes.Structure):
    """PJRT_Extension_Base: 24 bytes."""

    _fields_ = (("struct_size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.c_void_p))


class _Api(ctypes.Structure):
    """PJRT_Api up to the one function that is replaced, PJRT_Client_Create at 0x78."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("version_struct_size", ctypes.c_size_t),
        ("version_extension_start", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("error_and_plugin_functions", ctypes.c_void_p * 5),
        ("event_functions", ctypes.c_void_p * 5),
        ("client_create", ctypes.c_void_p),
    )


class _NamedValue(ctypes.Structure):
    """PJRT_NamedValue: 56 bytes."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("name", ctypes.c_void_p),
        ("name_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("value_size", ctypes.c_size_t),
    )


class _ClientCreateArgs(ctypes.Structure):
    """PJRT_Client_Create_Args up to the options."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("create_options", ctypes.POINTER(_NamedValue)),
        ("num_options", ctypes.c_size_t),
    )


_CreateFunction = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ClientCreateArgs))

# A count function of the extension; its arguments are {size_t; topology*; int32 count}: count = 1, no error. It is machine code
# since torch_tpu calls it from its compile threads while the main thread may wait for them with Python's lock held.
_COUNT_ONE = bytes.fromhex(
    "f30f1efa"  # endbr64
    "c7471001000000"  # mov dword ptr [rdi+16], 1
    "31c0"  # xor eax, eax
    "c3"  # ret
)


class _TpuTopology(ctypes.Structure):
    """PJRT_TpuTopology_Extension: 272 bytes. Only the counts are supplied, as nothing else is asked of one chip."""

    _fields_ = (
        ("base", _Extension),
        ("subslice_functions", ctypes.c_void_p * 7),
        ("count_functions", ctypes.c_void_p * 9),  # processes, chips, cores and logical devices, whole or each
        ("coordinate_functions", ctypes.c_void_p * 15),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plugin:
    """The patched plugin. Lives as long as the process: C code holds pointers into it.

    Attributes:
        path: The shared library.
        api: Address of its PJRT_Api.
        held: What Python must not collect: the library, the extension and the callbacks.
    """

    path: pathlib.Path
    api: int
    held: tuple[Any, ...]


def is_installed() -> bool:
    """Returns whether the plugin's package is installed, in whatever version."""
    try:
        importlib.metadata.version(PLUGIN_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def find_plugin() -> pathlib.Path:
    """Returns the plugin's shared library without loading it.

    Raises:
        DeviceError: It is not installed, or not in the version whose table is known.
    """
    try:
        version = importlib.metadata.version(PLUGIN_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise DeviceError(
            "tpu",
            f"{PLUGIN_PACKAGE} is not installed",
            "the emulator's packages on a machine without a TPU",
            f"Run: {INSTALL_COMMAND}",
        ) from None
    spec = importlib.util.find_spec(_PLUGIN_MODULE)
    path = pathlib.Path(spec.origin).parent / _PLUGIN_FILE if spec and spec.origin else pathlib.Path(_PLUGIN_FILE)
    if version != PLUGIN_VERSION or not path.is_file():
        found = f"{PLUGIN_PACKAGE} {version}" if path.is_file() else f"{PLUGIN_PACKAGE} {version} without {_PLUGIN_FILE}"
        raise DeviceError(
            "tpu", found, f"{PLUGIN_PACKAGE} {PLUGIN_VERSION}, whose API table is patched by offset", f"Run: {INSTALL_COMMAND}"
        )
    return path


@functools.cache
def patched_plugin() -> Plugin:
    """Loads the plugin and amends its API table, once a process.

    Raises:
        DeviceError: There is no plugin, or its table is not the one this module knows.
    """
    path = find_plugin()
    if platform.machine() != "x86_64":
        raise DeviceError("tpu", f"this machine is {platform.machine()}", "x86_64, for the emulated device", "")
    library = ctypes.CDLL(str(path))
    library.GetPjrtApi.restype = ctypes.c_void_p
    address = library.GetPjrtApi()
    api = _Api.from_address(address)
    _check_table(api, address)
    create = _with_own_options(_CreateFunction(api.client_create))
    page, count_one = _executable(_COUNT_ONE)
    topology = _one_chip(api.extension_start, count_one)
    api.client_create = ctypes.cast(create, ctypes.c_void_p).value
    api.extension_start = ctypes.addressof(topology)
    return Plugin(path=path, api=address, held=(library, create, topology, page))


def _check_table(api: _Api, address: int) -> None:
    version = (api.major, api.minor)
    if version != _API_VERSION or api.struct_size != _API_BYTES:
        raise DeviceError(
            "tpu",
            f"the CPU plugin's PJRT C API is {version[0]}.{version[1]} with a table of {api.struct_size} bytes",
            f"{_API_VERSION[0]}.{_API_VERSION[1]} with {_API_BYTES} bytes",
            f"Run: {INSTALL_COMMAND}",
        )
    if not any(start <= address and address + _API_BYTES <= end for start, end, _ in _writable_memory()):
        raise DeviceError(
            "tpu", "the CPU plugin's API table lies in read-only memory", "a writable one", f"Run: {INSTALL_COMMAND}"
        )


def _with_own_options(create: Any) -> Any:
    """Wraps PJRT_Client_Create: without the option the CPU client refuses, and with one device where it would have four."""

    @_CreateFunction
    def client_create(args: Any) -> int | None:
        options, count = args.contents.create_options, args.contents.num_options
        kept = [option for option in options[:count] if ctypes.string_at(option.name, option.name_size) != _REFUSED_OPTION]
        name = ctypes.cast(ctypes.c_char_p(_DEVICE_COUNT), ctypes.c_void_p)
        kept.append(_NamedValue(ctypes.sizeof(_NamedValue), None, name, len(_DEVICE_COUNT), _INT64, 1, 1))
        array = (_NamedValue * len(kept))(*kept)
        args.contents.create_options, args.contents.num_options = ctypes.cast(array, ctypes.POINTER(_NamedValue)), len(kept)
        try:
            return create(args)
        finally:
            args.contents.create_options, args.contents.num_options = options, count

    return client_create


def _one_chip(following: int | None, count_one: int) -> _TpuTopology:
    topology = _TpuTopology(base=_Extension(ctypes.sizeof(_TpuTopology), _TPU_TOPOLOGY, following))
    topology.count_functions[:] = [count_one] * len(topology.count_functions)
    return topology


def _executable(code: bytes) -> tuple[mmap.mmap, int]:
    """Puts machine code where it may run; returns the mapping, to be kept, and the address."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        raise DeviceError(
            "tpu",
            f"this system lets no process make code at run time: {os.strerror(ctypes.get_errno())}",
            "mprotect(PROT_EXEC) on private memory",
            "Allow it (SELinux: execmem) for the emulated device.",
        )
    return page, address


def redirect(registered: int, replacement: int, look_up: Callable[[], int | None]) -> bool:
    """Points XLA's table of PJRT plugins, in this process, from one PJRT_Api to another.

    The table has no function that replaces an entry, so the entry is found by its content: the key ``"tpu"`` as a
    libstdc++ string that holds its text itself (a pointer to the text 16 bytes on, the length), then the PJRT_Api's address.
    ``look_up`` asks XLA's own function afterwards; an entry that does not change what it says is put back.

    Args:
        registered: Address of the PJRT_Api that the table holds.
        replacement: Address of the one it shall hold.
        look_up: Asks XLA which one it holds.

    Returns:
        Whether the table now holds the replacement.
    """
    for entry in _entries_of(registered):
        slot = ctypes.c_uint64.from_address(entry + 32)
        slot.value = replacement
        if look_up() == replacement:
            return True
        slot.value = registered
    return False


def _entries_of(api: int) -> Iterator[int]:
    """Yields the addresses of table entries ``{std::string "tpu", PJRT_Api* api}``, the malloc heap first."""
    needle = api.to_bytes(8, "little")
    spans = sorted(_writable_memory(), key=lambda span: not span[2])
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for start, end, _ in spans:
            try:
                memory.seek(start)
                content = memory.read(end - start)
            except OSError:  # a mapping that went away, or one of a device
                continue
            place = content.find(needle, 32)
            while place >= 0:
                key, text = int.from_bytes(content[place - 32 : place - 24], "little"), content[place - 24 : place - 12]
                if key == start + place - 16 and text == (3).to_bytes(8, "little") + b"tpu\0":
                    yield start + place - 32
                place = content.find(needle, place + 1)


def _writable_memory() -> Iterator[tuple[int, int, bool]]:
    """Yields (start, end, is it the malloc heap) of this process's writable mappings."""
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        span, permissions = line.split(maxsplit=2)[:2]
        if permissions.startswith("rw"):
            start, end = span.split("-")
            yield int(start, 16), int(end, 16), line.endswith("[heap]")
