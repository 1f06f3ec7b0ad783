"""Every shipped kernel as a torch op: on the tpu device, on CPU tensors and compiled, with gradients."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tpukern
from tpukern import kernels
from tpukern.dsl import Kernel, Workload

KERNELS: list[Kernel] = [k for name in kernels.__all__ if (k := getattr(kernels, name)).frontend == "pallas"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:<TorchTpu/"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # torch_tpu looks at it
]


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    torch.set_num_threads(1)  # two threads beside XLA are slower by far
    torch.manual_seed(0)
    tpukern.enable(only=[])
    yield
    tpukern.disable()


def inputs_of(kernel: Kernel, dtype: str = "float32") -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Returns CPU inputs of small odd sizes, two leading axes where any number may be, and the statics of a workload."""
    k = kernel.declaration
    statics = {name: v for name, v in kernel.workloads[-1].values.items() if name in k.statics}
    sizes: dict[str, Any] = {
        name: 2 if name in k.dims and k.dims[name].each else 20 + 3 * n for n, name in enumerate(names(kernel))
    }
    star = k.inputs[0].axes[0]
    sizes[star.name] = (2, 3)  # type: ignore[union-attr]
    signature = kernel.workload_signature(Workload("small", dtype=dtype, **{**sizes, **statics}))
    return [torch.randn(o.shape).to(getattr(torch, o.dtype)) for o in signature.inputs], statics


def names(kernel: Kernel) -> list[str]:
    return list(dict.fromkeys(name for o in kernel.declaration.inputs for name in o.names))


def check(kernel: Kernel, call: Any, inputs: list[torch.Tensor], statics: dict[str, Any], device: str) -> None:
    """Compares output and gradients of `call` on a device with the reference in float64."""
    placed = [x.to(device).requires_grad_() for x in inputs]
    y = call(*placed, **statics)
    assert isinstance(y, torch.Tensor), "outputs kept for the backward pass are not returned"
    assert y.device.type == device
    dy = torch.randn(y.shape).to(y.dtype)
    gradients = torch.autograd.grad(y, placed, dy.to(device))
    exact = [x.double().requires_grad_() for x in inputs]
    assert kernel.reference is not None
    want = kernel.reference(*exact, **{**kernel.declaration.statics, **statics})
    wanted = torch.autograd.grad(want, exact, dy.double())
    for got, right in zip((y, *gradients), (want, *wanted), strict=True):
        tolerance = kernel.tolerance[str(got.dtype).removeprefix("torch.")] * torch.finfo(got.dtype).eps
        if got.dtype == torch.float32:  # a unit grows with the root of what is summed: see tpukern.testing.ulp
            tolerance *= 1 + max(max(x.shape) for x in inputs) ** 0.5
        scale = float(right.detach().abs().max())
        torch.testing.assert_close(got.detach().cpu().double(), right.detach(), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_on_the_device(kernel: Kernel, dtype: str) -> None:
    inputs, statics = inputs_of(kernel, dtype)
    check(kernel, kernel, inputs, statics, "tpu")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_on_cpu_tensors(kernel: Kernel) -> None:
    inputs, statics = inputs_of(kernel)
    check(kernel, kernel, inputs, statics, "cpu")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_compiled(kernel: Kernel) -> None:
    inputs, statics = inputs_of(kernel)
    torch._dynamo.reset()

    def call(*tensors: torch.Tensor, **values: Any) -> torch.Tensor:
        result: torch.Tensor = kernel(*tensors, **values)
        return result

    check(kernel, torch.compile(call, backend="tpu", fullgraph=True), inputs, statics, "tpu")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_as_the_op_of_its_name(kernel: Kernel) -> None:
    assert kernel.op is not None
    namespace, _, name = kernel.op.partition("::")
    inputs, statics = inputs_of(kernel)
    op = getattr(getattr(torch.ops, namespace), name)
    outputs = op(*(x.to("tpu") for x in inputs), **statics)
    first = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    assert torch.equal(first.cpu(), kernel(*(x.to("tpu") for x in inputs), **statics).cpu())
