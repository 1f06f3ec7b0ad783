"""Every shipped kernel that is written in Helion: results and gradients, overrides, graphs, chips, and a Python without Helion.

`tpukern verify` asks more of each; here every one is called once a dtype, on small odd shapes.
"""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tpukern
from tpukern import compiling, explanation, kernels, target
from tpukern.dsl import Kernel, Workload

pytest.importorskip("helion")
KERNELS: list[Kernel] = [k for name in kernels.__all__ if (k := getattr(kernels, name)).frontend == "helion"]
SIZES = {"r": (2, 3), "b": 3, "m": (2, 9), "s": 19, "h": 2, "v": 37, "d": 40, "f": 130, "n": 33, "k": 150}
pytestmark = [
    pytest.mark.filterwarnings("ignore:<TorchTpu/"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # torch_tpu looks at it
]


@pytest.fixture
def _device() -> Iterator[None]:
    torch.set_num_threads(1)  # two threads beside XLA are slower by far
    torch.manual_seed(0)
    tpukern.enable(only=[])
    explanation.reset()
    yield
    tpukern.disable()


def case(kernel: Kernel, dtype: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Returns CPU inputs of small odd sizes, and the statics of the kernel's last workload."""
    k = kernel.declaration
    statics = {name: v for name, v in kernel.workloads[-1].values.items() if name in k.statics}
    starred = {o.axes[0].name for o in k.inputs if getattr(o.axes[0], "leading", False)}  # type: ignore[union-attr]
    sizes: dict[str, Any] = {}
    for name in dict.fromkeys(name for o in k.inputs for name in o.names):
        size = SIZES[name]
        sizes[name] = math.prod(size) if isinstance(size, tuple) and name not in starred else size
    signature = kernel.workload_signature(Workload("small", dtype=dtype, **{**sizes, **statics}))
    found = []
    for o in signature.inputs:
        if o.dtype == "int32":
            found.append(torch.randint(0, SIZES["v"], o.shape, dtype=torch.int32))  # type: ignore[call-overload]
        else:
            found.append(torch.randn(o.shape).to(getattr(torch, o.dtype)))
    return found, statics


def check(kernel: Kernel, call: Any, inputs: list[torch.Tensor], statics: dict[str, Any], device: str) -> None:
    """Compares output and gradients of `call` on a device with the reference in float64."""
    placed = [x.detach().to(device).requires_grad_(x.is_floating_point()) for x in inputs]
    exact = [(x.double() if x.is_floating_point() else x).requires_grad_(x.is_floating_point()) for x in inputs]
    assert kernel.reference is not None
    got, want = call(*placed, **statics), kernel.reference(*exact, **{**kernel.declaration.statics, **statics})
    got, want = (r if isinstance(r, tuple) else (r,) for r in (got, want))
    cotangents = [torch.randn(y.shape).to(y.dtype) for y in got]
    of = [n for n, x in enumerate(inputs) if x.is_floating_point()]
    if kernel.name == "rotary":
        of = of[:1]  # angles are constants: they get no gradient
    assert kernel.gradient is not None
    gradients = torch.autograd.grad(got, [placed[n] for n in of], [dy.to(device) for dy in cotangents])
    wanted = torch.autograd.grad(want, [exact[n] for n in of], [dy.double() for dy in cotangents])
    for result, right in zip((*got, *gradients), (*want, *wanted), strict=True):
        assert result.device.type == device
        tolerance = kernel.tolerance[str(result.dtype).removeprefix("torch.")] * torch.finfo(result.dtype).eps
        if result.dtype == torch.float32:  # a unit grows with the root of what is summed: see tpukern.testing.ulp
            tolerance *= 1 + max(max(x.shape) for x in inputs) ** 0.5
        scale = float(right.detach().abs().max())
        torch.testing.assert_close(result.detach().cpu().double(), right.detach(), rtol=0, atol=tolerance * scale)


def test_there_are_ten_at_least() -> None:
    assert len(KERNELS) >= 10
    assert all(kernel.reference and kernel.tolerance and kernel.workloads and kernel.gradient for kernel in KERNELS)
    assert [o.op for kernel in KERNELS for o in kernel.overrides if not o.opt_in] == []


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_on_the_device(kernel: Kernel) -> None:
    inputs, statics = case(kernel, "float32")
    check(kernel, kernel, inputs, statics, "tpu")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_small_blocks_on_cpu_tensors(kernel: Kernel) -> None:
    """In bfloat16 and as many steps as can be: what lies past the end of the last block is NaN there."""
    inputs, statics = case(kernel, "bfloat16")
    signature = kernel.signature(*inputs, **statics)
    config = kernel.helion.drawn(signature, "smallest", None)  # type: ignore[union-attr, arg-type]
    check(kernel, lambda *args, **kw: kernel(*args, **kw, config=str(config)), inputs, statics, "cpu")


def test_one_op_in_both_frontends_is_the_same() -> None:
    """Sums of the same products in another order."""
    assert (kernels.linear.frontend, kernels.linear_helion.frontend) == ("pallas", "helion")
    inputs, _ = case(kernels.linear_helion, "float32")
    for act in ("none", "relu"):
        results = []
        for kernel in (kernels.linear, kernels.linear_helion):
            torch.manual_seed(1)
            placed = [x.detach().requires_grad_() for x in inputs]
            y = kernel(*placed, act=act)
            results.append((y.detach(), *torch.autograd.grad(y, placed, torch.randn(y.shape))))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6 * float(b.abs().max()))


def test_compile() -> None:
    """One workload of each in both directions, for the chips by turns; `make demo` compiles all of them for all three."""
    jobs = []
    for n, kernel in enumerate(KERNELS):
        chip = ("v5e", "v6e", "v7x")[n % 3]
        for one in kernel.directions.values():
            bound = one.bind_signature(one.workload_signature(kernel.workloads[-1]), target=chip)
            jobs.append(compiling.Job(bound=bound, target=target(chip)))
    assert [(r.kernel, r.target, r.error) for r in compiling.compile_many(jobs) if not r.ok] == []


@pytest.mark.usefixtures("_device")
def test_one_node_in_a_whole_graph() -> None:
    nodes: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    x = torch.randn(5, 40, device="tpu")
    compiled = torch.compile(lambda v: kernels.softmax(v), backend=backend, fullgraph=True)
    assert torch.equal(compiled(x).cpu(), kernels.softmax(x).cpu())
    assert nodes == ["tpukern.softmax.default"]
    inputs, statics = case(kernels.geglu, "float32")
    check(kernels.geglu, torch.compile(lambda *a: kernels.geglu(*a), backend="tpu", fullgraph=True), inputs, statics, "tpu")
    torch._dynamo.reset()


# --- overrides -------------------------------------------------------------------------------------------------------


def served(op: str) -> list[str]:
    """Returns what served the calls of an op: kernels, or reasons in their place."""
    return [row.kernel or row.reason for row in explanation.explain().rows if row.op == op]


OVERRIDDEN = [
    ("softmax", "aten::_softmax", "aten::_softmax_backward_data", lambda x, *_: F.softmax(x, -1)),
    ("log_softmax", "aten::_log_softmax", "aten::_log_softmax_backward_data", lambda x, *_: F.log_softmax(x, -1)),
    (
        "layer_norm",
        "aten::native_layer_norm",
        "aten::native_layer_norm_backward",
        lambda x, w, b: F.layer_norm(x, (40,), w, b, 1e-5),
    ),
]


@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize(("name", "forward", "backward", "call"), OVERRIDDEN, ids=[o[0] for o in OVERRIDDEN])
def test_overrides(name: str, forward: str, backward: str, call: Any) -> None:
    """ATen's op, through the kernel on the device, is ATen's on the CPU; not unless it was asked for."""
    kernel: Kernel = getattr(kernels, name)
    inputs = [torch.randn(2, 3, 40), torch.randn(40), torch.randn(40)][: len(kernel.declaration.inputs)]
    tpukern.enable()
    call(*(x.to("tpu") for x in inputs))
    assert all(name not in row.kernel for row in explanation.explain().rows if row.op == forward)
    tpukern.enable(only=[name], opt_in=[name])
    explanation.reset()
    dy = torch.randn(2, 3, 40)
    results = []
    for device in ("tpu", "cpu"):
        placed = [x.detach().to(device).requires_grad_() for x in inputs]
        y = call(*placed)
        results.append([r.detach().cpu() for r in (y, *torch.autograd.grad(y, placed, dy.to(device)))])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert served(forward) == [name]
    assert served(backward) == [f"{name}_backward"]


X = torch.zeros(3, 40)


@pytest.mark.parametrize(
    ("name", "op", "arguments", "reason"),
    [
        ("softmax", 0, (X, -1, False), None),
        ("softmax", 0, (X, 0, False), "dim 0 is not the last of 2"),
        ("softmax", 0, (X, -1, True), "half_to_float is set"),
        ("softmax", 0, (X[:0], -1, False), "the input is empty"),
        ("log_softmax", 0, (X.half(), 1, False), "the input is torch.float16, the kernel has float32 and bfloat16"),
        ("softmax", 1, (X, X, -1, torch.bfloat16), "the gradient is torch.float32, the input torch.bfloat16"),
        ("layer_norm", 0, (X, [40], X[0], X[0], 1e-5), None),
        ("layer_norm", 0, (X, [3, 40], X, X, 1e-5), "normalized_shape [3, 40] is not the last axis of [3, 40]"),
        ("layer_norm", 0, (X, [40], X[0], None, 1e-5), "the weight or the bias is missing"),
        ("layer_norm", 0, (X[:0], [40], X[0], X[0], 1e-5), "the input is empty"),
        (
            "layer_norm",
            0,
            (X, [40], X[0].bfloat16(), X[0], 1e-5),
            "the weight is torch.bfloat16, the bias torch.float32, the input torch.float32",
        ),
    ],
)
def test_why_aten_keeps_a_call(name: str, op: int, arguments: tuple[Any, ...], reason: str | None) -> None:
    override = getattr(kernels, name).overrides[op]
    assert override.cond(*arguments) == reason


# --- without Helion --------------------------------------------------------------------------------------------------


WITHOUT = """
import torch
from tpukern import helion_adapter

helion_adapter.installed = lambda: None
from tpukern import kernels
from tpukern.errors import ConfigError

ones = torch.ones(3, 4)
torch.testing.assert_close(kernels.swiglu(ones, ones), torch.nn.functional.silu(ones))
try:
    kernels.softmax(ones)
except ConfigError as error:
    print(error)
"""


def test_without_helion_its_kernels_say_what_to_install() -> None:
    calm = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=300, env=calm)
    assert (done.returncode, done.stdout) == (
        0,
        "helion[config]: helion is not installed; expected helion 1.5.1, which was tested. pip install 'tpukern[helion]'\n",
    ), done.stderr
