"""Which device there is, starting it in any order, and the adapter to torch_tpu."""

import importlib
import importlib.metadata
import io
import os
import pathlib
import subprocess
import sys
import threading

import pytest
import torch

from tpukern import device, environment, pjrt_cpu, torch_tpu_adapter
from tpukern.errors import DeviceError, OverrideError

pytestmark = pytest.mark.filterwarnings("ignore:<TorchTpu/")


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh process, away from the repository."""
    names = ("TPU_LIBRARY_PATH", "XLA_FLAGS", "TORCH_DEVICE_BACKEND_AUTOLOAD", "JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL")
    env = {k: v for k, v in os.environ.items() if k not in names} | variables
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
    return done


def python(code: str, **variables: str) -> str:
    """Runs a program in a fresh process; returns what it wrote to stdout."""
    return run(code, **variables).stdout


@pytest.fixture
def needs_emulator() -> None:
    if device.kind() != "emulated":
        pytest.skip("needs the emulated device")


# --- starting --------------------------------------------------------------------------------------------------------

USE = """
import os
import torch
x = torch.arange(12.0, device="tpu").reshape(3, 4).requires_grad_()
(x.cumsum(1) ** 2).sum().backward()
want = torch.arange(12.0).reshape(3, 4).requires_grad_()
(want.cumsum(1) ** 2).sum().backward()
assert torch.equal(x.grad.cpu(), want.grad), (x.grad, want.grad)
assert torch.accelerator.device_count() == 1
assert os.environ.get("XLA_FLAGS") == XLA_FLAGS
assert "cpu_plugin" not in os.environ.get("TPU_LIBRARY_PATH", "")
print("TPU_LIBRARY_PATH" in os.environ)
"""


@pytest.mark.parametrize("first", ["torch", "tpukern"])
def test_starts_in_either_order(needs_emulator, first: str) -> None:
    flags = "--xla_dump_max_hlo_modules=7"
    start = "from tpukern import device\nassert device.start() == device.start() == device.kind() == 'emulated'\n"
    code = f"XLA_FLAGS = {flags!r}\nimport {first}\n{start}{USE}"
    assert python(code, XLA_FLAGS=flags) == ("True\n" if first == "torch" else "False\n")  # libtpu's own path stays


def test_starts_without_autoload_and_says_nothing(needs_emulator) -> None:
    code = """
import sys
import torch
assert "torch_tpu" not in sys.modules
from tpukern import device
device.start()
x = torch.ones(3, device="tpu", requires_grad=True)
(x * 2).sum().backward()
print((x + 1).sum().item())
"""
    done = run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (done.stdout, done.stderr) == ("6.0\n", "")


def test_looking_loads_nothing() -> None:
    code = """
import sys
from tpukern import device
print(device.kind(), device.target(), device.started())
heavy = {"torch", "jax", "jaxlib", "libtpu", "torch_tpu", "numpy", "helion"} & set(sys.modules)
assert not heavy, heavy
"""
    assert python(code).split()[0] in ("tpu", "emulated", "none")


def test_a_forked_child_is_refused_in_python(tpu) -> None:
    code = """
import os
from tpukern import device
device.start()
import torch
read, write = os.pipe()
if os.fork() == 0:
    try:
        torch.ones(2, device="tpu").sum().item()
    except RuntimeError as error:
        os.write(write, str(error).encode())
    os._exit(0)
os.wait()
os.close(write)
print(os.read(read, 1000).decode())
"""
    assert "forked subprocess" in python(code)


def test_kernels_do_not_wait_for_python(needs_emulator) -> None:
    """torch_tpu counts chips on a compile thread while a blocking call holds Python's lock on the main thread."""
    code = """
from tpukern import device, torch_tpu_adapter
device.start()
import jax, torch
jax.config.update("jax_platforms", "cpu")
torch.tpu.eager_mode = torch.tpu.EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING
export = jax.export.export(jax.jit(lambda x: (x * 2,)), platforms=["tpu"])
serialized = export(jax.ShapeDtypeStruct((8, 128), "float32")).mlir_module_serialized
torch_tpu_adapter.register_custom_kernel("twice", "1", serialized)
x = torch.ones(8, 128, device="tpu")
print(torch_tpu_adapter.call_custom_kernel("twice", "1", [x], [torch.empty_like(x, device="meta")])[0].sum().item())
"""
    assert python(code) == f"{2.0 * 8 * 128}\n"


# --- which -----------------------------------------------------------------------------------------------------------


def bus(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *chips: tuple[str, str, str | None]) -> None:
    """Makes a PCI bus of (vendor, device, VFIO group or None)."""
    pci, dev = tmp_path / "pci", tmp_path / "dev"
    (dev / "vfio").mkdir(parents=True)
    pci.mkdir()
    for place, (vendor, chip, group) in enumerate(chips):
        folder = pci / f"0000:00:{place:02}.0"
        folder.mkdir()
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(chip + "\n")
        if group is not None:
            (folder / "iommu_group").symlink_to(tmp_path / "groups" / group)
            (dev / "vfio" / group).touch()
    for name, value in (("_PCI", pci), ("_DEV", dev), ("_started", None)):
        monkeypatch.setattr(device, name, value)


@pytest.mark.parametrize(
    ("pci_id", "name"), [("0x005e", "v4"), ("0x0062", "v5p"), ("0x0063", "v5e"), ("0x006f", "v6e"), ("0x0076", "v7x")]
)
def test_a_chip_is_found_on_the_bus(tmp_path, monkeypatch, pci_id: str, name: str) -> None:
    bus(tmp_path, monkeypatch, ("0x8086", "0x1237", None), ("0x1ae0", pci_id, "3"))
    target = device.target()
    assert device.kind() == "tpu"
    assert target is not None
    assert target.name == name
    assert device.description() == f"a real TPU ({name})"


def test_the_older_driver_is_known(tmp_path, monkeypatch) -> None:
    bus(tmp_path, monkeypatch, ("0x1ae0", "0x005e", None))
    assert device.chips() == ()
    (tmp_path / "dev" / "accel0").touch()
    assert device.chips() == ("v4",)


def test_other_devices_are_no_chips(tmp_path, monkeypatch) -> None:
    bus(tmp_path, monkeypatch, ("0x1ae0", "0x0042", "1"), ("0x10de", "0x0063", "2"), ("0x1ae0", "0x0063", None))
    assert device.chips() == ()
    monkeypatch.setattr(device, "_PCI", tmp_path / "none")
    assert device.chips() == ()
    assert device.kind() in ("emulated", "none")
    assert device.target() is None


def absent(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Makes packages look as if they were not installed."""
    version = importlib.metadata.version

    def missing(name: str) -> str:
        if name in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)


def test_no_emulator(tmp_path, monkeypatch) -> None:
    bus(tmp_path, monkeypatch)
    absent(monkeypatch, "lammps-jax-pjrt-cpu")
    assert device.kind() == "none"
    assert device.description() == "none"
    with pytest.raises(DeviceError) as caught:
        device.start()
    assert str(caught.value) == (
        "tpu[device]: lammps-jax-pjrt-cpu is not installed; expected the emulator's packages on a machine without a TPU. "
        "Run: pip install 'tpukern[emulator]'"
    )
    assert device.started() is None


def test_a_chip_without_torch_tpu(tmp_path, monkeypatch) -> None:
    bus(tmp_path, monkeypatch, ("0x1ae0", "0x0063", "1"))
    absent(monkeypatch, "torch_tpu")
    with pytest.raises(DeviceError) as caught:
        device.start()
    assert str(caught.value) == (
        "tpu[device]: torch_tpu is not installed; expected torch_tpu, PyTorch's TPU backend. Run: pip install 'tpukern[tpu]'"
    )


def test_another_backend_has_the_place(monkeypatch) -> None:
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "npu")
    with pytest.raises(DeviceError) as caught:
        torch_tpu_adapter.check()
    assert str(caught.value) == (
        "tpu[device]: the backend 'npu' has PyTorch's PrivateUse1 place in this process; expected a process in which only "
        "torch_tpu claims it. Start the tpu device in a process of its own."
    )


# --- the plugin ------------------------------------------------------------------------------------------------------


def test_another_plugin_version_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.12.0")
    with pytest.raises(DeviceError) as caught:
        pjrt_cpu.find_plugin()
    assert str(caught.value) == (
        "tpu[device]: lammps-jax-pjrt-cpu 0.12.0; expected lammps-jax-pjrt-cpu 0.11.2, whose API table is patched by offset. "
        "Run: pip install 'tpukern[emulator]'"
    )


def test_an_unknown_table_is_refused() -> None:
    api = pjrt_cpu._Api(struct_size=1152, major=0, minor=117)
    with pytest.raises(DeviceError) as caught:
        pjrt_cpu._check_table(api, 4096)
    assert str(caught.value) == (
        "tpu[device]: the CPU plugin's PJRT C API is 0.117 with a table of 1152 bytes; expected 0.115 with 1144 bytes. "
        "Run: pip install 'tpukern[emulator]'"
    )


def test_a_read_only_table_is_refused() -> None:
    api = pjrt_cpu._Api(struct_size=1144, major=0, minor=115)
    with pytest.raises(DeviceError) as caught:
        pjrt_cpu._check_table(api, 4096)  # no address of this process
    assert str(caught.value) == (
        "tpu[device]: the CPU plugin's API table lies in read-only memory; expected a writable one. "
        "Run: pip install 'tpukern[emulator]'"
    )


def test_the_structs_are_those_of_the_header() -> None:
    assert pjrt_cpu._Api.client_create.offset == 0x78
    assert pjrt_cpu._ClientCreateArgs.create_options.offset == 0x10
    assert pjrt_cpu._ClientCreateArgs.num_options.offset == 0x18
    topology = pjrt_cpu._TpuTopology
    assert [topology.count_functions.offset, topology.coordinate_functions.offset] == [0x50, 0x98]
    sizes = [pjrt_cpu.ctypes.sizeof(s) for s in (pjrt_cpu._Extension, pjrt_cpu._NamedValue, topology)]
    assert sizes == [24, 56, 272]


def test_a_used_device_keeps_its_plugin(tpu, needs_emulator) -> None:
    other = pjrt_cpu.Plugin(path=pathlib.Path("other.so"), api=4096, held=())
    with pytest.raises(DeviceError) as caught:
        device._use_plugin(other)
    assert str(caught.value) == (
        "tpu[device]: torch_tpu already runs on another plugin; expected a torch_tpu whose device has not been used. Call "
        "tpukern.enable() before the first use of the tpu device, or start Python with TORCH_DEVICE_BACKEND_AUTOLOAD=0."
    )


def test_a_plugin_that_cannot_be_exchanged(tpu, needs_emulator, monkeypatch) -> None:
    other = pjrt_cpu.Plugin(path=pathlib.Path("other.so"), api=4096, held=())
    monkeypatch.setattr(torch_tpu_adapter, "runtime_is_up", lambda: False)
    monkeypatch.setattr(torch_tpu_adapter, "registered_plugin", lambda: 0x1234567890)  # in no table
    with pytest.raises(DeviceError) as caught:
        device._use_plugin(other)
    assert str(caught.value) == (
        "tpu[device]: torch_tpu was loaded on libtpu before and its choice cannot be changed. Call tpukern.enable() before the "
        "first use of the tpu device, or start Python with TORCH_DEVICE_BACKEND_AUTOLOAD=0."
    )


def test_an_entry_that_changes_nothing_is_put_back() -> None:
    string, api = (pjrt_cpu.ctypes.c_uint64 * 5)(), 0x7777777777770001
    address = pjrt_cpu.ctypes.addressof(string)
    string[0], string[1], string[2], string[4] = address + 16, 3, int.from_bytes(b"tpu", "little"), api
    asked = []
    assert not pjrt_cpu.redirect(api, 4096, lambda: asked.append(string[4]) or None)
    assert asked == [4096]
    assert string[4] == api


# --- torch_tpu -------------------------------------------------------------------------------------------------------


def test_no_private_name_is_missing(tpu) -> None:
    assert torch_tpu_adapter.missing_names() == ()
    assert torch_tpu_adapter.installed_version() in torch_tpu_adapter.KNOWN_VERSIONS
    assert torch_tpu_adapter.fast_path()


def test_missing_names_are_named(tpu, monkeypatch) -> None:
    monkeypatch.setattr(torch_tpu_adapter, "_DEVICE_NAMES", {"torch_tpu._loader": ("_init_device", "_gone")})
    monkeypatch.setattr(torch_tpu_adapter, "_PLUGIN_IS_UP", "_ZN4gone")
    assert torch_tpu_adapter.missing_names() == ("torch_tpu._loader._gone", "libxla_base.so pjrt::IsPjrtPluginInitialized")
    with pytest.raises(DeviceError) as caught:
        torch_tpu_adapter.initialize()
    assert str(caught.value) == (
        "tpu[device]: torch_tpu 0.2.0 has no torch_tpu._loader._gone; expected torch_tpu 0.2.0. Run: pip install 'tpukern[tpu]'"
    )
    with pytest.raises(DeviceError) as caught:
        torch_tpu_adapter.runtime_is_up()
    assert str(caught.value) == (
        "tpu[device]: torch_tpu 0.2.0 has no _ZN4gone in csrc/common/libxla_base.so; expected torch_tpu 0.2.0. "
        "Start Python with TORCH_DEVICE_BACKEND_AUTOLOAD=0."
    )


def test_a_torch_tpu_that_cannot_be_imported(monkeypatch) -> None:
    def broken(name: str) -> None:
        raise ImportError(f"no glue for {name}")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(DeviceError) as caught:
        torch_tpu_adapter.load()
    assert str(caught.value) == (
        "tpu[device]: torch_tpu 0.2.0 cannot be imported: no glue for torch. Run: pip install 'tpukern[tpu]'"
    )
    assert isinstance(caught.value.__cause__, ImportError)


def lowered_kernel(interpret: bool = True):
    """A Pallas kernel in interpret form, y = 2x + 1 and its row sums: the JAX function and what torch_tpu takes."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    def body(x_ref, y_ref, s_ref):
        y_ref[...] = x_ref[...] * 2 + 1
        s_ref[...] = jnp.sum(x_ref[...], axis=1, keepdims=True)

    def function(x):
        rows, columns = x.shape
        block = pl.BlockSpec((8, columns), lambda i: (i, 0))
        return pl.pallas_call(
            body,
            grid=(rows // 8,),
            in_specs=[block],
            out_specs=[block, pl.BlockSpec((8, 1), lambda i: (i, 0))],
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((rows, 1), x.dtype)],
            interpret=interpret,
        )(x)

    export = jax.export.export(jax.jit(function, keep_unused=True), platforms=["tpu"])
    return function, export(jax.ShapeDtypeStruct((32, 128), jnp.float32)).mlir_module_serialized


@pytest.mark.parametrize("entry", ["_private_entry", "_public_entry"])
def test_a_kernel_runs(tpu, needs_emulator, entry: str) -> None:
    function, serialized = lowered_kernel()
    road = getattr(torch_tpu_adapter, entry)()
    road.register("twice", "32x128", serialized, function)
    x = torch.randn(32, 128)
    metas = [torch.empty(32, 128, device="meta"), torch.empty(32, 1, device="meta")]
    for given in (x.to("tpu"), x.t().contiguous().to("tpu").t()):  # contiguous, and a strided view
        y, s = road.call("twice", "32x128", [given], metas)
        torch.testing.assert_close(y.cpu(), x * 2 + 1)
        torch.testing.assert_close(s.cpu(), x.sum(1, keepdim=True))


def test_the_public_road_needs_the_function() -> None:
    with pytest.raises(OverrideError) as caught:
        torch_tpu_adapter._public_entry().register("twice", "1", b"")
    assert str(caught.value) == (
        "twice[override]: torch_tpu 0.2.0 takes no lowered kernels; expected torch_tpu 0.2.0, or the JAX function. "
        "Run: pip install 'tpukern[tpu]'"
    )


def test_an_unknown_version_takes_the_public_road(monkeypatch) -> None:
    monkeypatch.setattr(torch_tpu_adapter, "KNOWN_VERSIONS", ("0.1.0",))
    torch_tpu_adapter.kernel_entry.cache_clear()
    try:
        assert not torch_tpu_adapter.fast_path()
    finally:
        torch_tpu_adapter.kernel_entry.cache_clear()


# --- PyTorch on it ---------------------------------------------------------------------------------------------------


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 4))


def losses(net: torch.nn.Module, call, place: str, optimizer: type[torch.optim.Optimizer]) -> list[float]:
    steps, x, y = optimizer(net.parameters(), lr=0.01), torch.linspace(-1, 1, 48).reshape(6, 8).to(place), []
    target = torch.arange(6).remainder(4).to(place)
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(call(x), target)
        steps.zero_grad()
        loss.backward()
        steps.step()
        y.append(loss.item())
    return y


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=lambda o: o.__name__)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_training_equals_the_cpu(tpu, optimizer: type[torch.optim.Optimizer], compiled: bool) -> None:
    cpu, ours = model(), model().to("tpu")
    want = losses(cpu, cpu, "cpu", optimizer)
    got = losses(ours, torch.compile(ours, backend="tpu") if compiled else ours, "tpu", optimizer)
    assert got == pytest.approx(want, rel=1e-4)
    assert want[-1] < want[0]


def test_random_numbers(tpu) -> None:
    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.randn(1000, device="tpu").cpu()

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))
    torch.manual_seed(3)
    with torch.random.fork_rng(device_type="tpu"):
        torch.randn(7, device="tpu")
    assert torch.equal(torch.randn(1000, device="tpu").cpu(), draw(3))
    assert abs(draw(5).mean().item()) < 0.15
    assert draw(5).std().item() == pytest.approx(1, abs=0.1)


def test_threads(tpu) -> None:
    results: dict[int, float] = {}

    def work(number: int) -> None:
        x = torch.full((16, 16), float(number), device="tpu", requires_grad=True)
        (x @ x).sum().backward()
        assert x.grad is not None
        results[number] = x.grad.sum().item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: 2.0 * number * 16**3 for number in range(1, 5)}


def test_save_and_load(tpu) -> None:
    ours, file = model().to("tpu"), io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    state = torch.load(file, map_location="cpu")
    assert all(torch.equal(state[name], value.cpu()) for name, value in ours.state_dict().items())
    file.seek(0)
    again = model().to("tpu")
    again.load_state_dict(torch.load(file))
    x = torch.ones(2, 8, device="tpu")
    assert torch.equal(again(x).cpu(), ours(x).cpu())


def test_jax_stays_on_the_cpu(tpu, needs_emulator) -> None:
    from tpukern import jax_adapter

    jax = jax_adapter.load()
    assert jax.default_backend() == "cpu"
    assert float(jax.jit(lambda x: x + 1)(1.0)) == 2.0
    assert "cpu_plugin" not in (environment.value("TPU_LIBRARY_PATH") or "")
