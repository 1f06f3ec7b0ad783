"""Matrix products in the place of ATen's, where they are asked for."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

import tpukern
from tpukern import explanation
from tpukern.kernels import matmul
from tpukern.testing import reference, ulp

pytestmark = [
    pytest.mark.filterwarnings("ignore:<TorchTpu/"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # torch_tpu looks at it
]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    torch.set_num_threads(1)  # two threads beside XLA are slower by far
    torch.manual_seed(0)
    tpukern.enable(only=[], opt_in=["matmul", "linear"])
    explanation.reset()
    yield
    tpukern.disable()


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype).to("tpu").requires_grad_()


def exactly(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.detach().cpu().double().requires_grad_() for x in tensors]


def served(op: str) -> list[str]:
    """Returns what served the calls of an op: kernels, or reasons in their place."""
    return [row.kernel or row.reason for row in explanation.explain().rows if row.op == op]


def assert_close(got: torch.Tensor, want: torch.Tensor, reduction: int) -> None:
    error = ulp.worst(reference.array(got), reference.array(want), reduction=reduction)
    assert error.ulps <= matmul.tolerance[str(got.dtype).removeprefix("torch.")], str(error)


def check(
    function: Callable[..., torch.Tensor], *inputs: torch.Tensor, compiled: Callable[..., torch.Tensor] | None = None
) -> None:
    """Compares a function (compiled, if given) and its gradients with the same in float64 on the CPU."""
    y = (compiled or function)(*inputs)
    exact = exactly(*inputs)
    want = function(*exact)
    reduction = max(size for x in inputs for size in x.shape)
    assert_close(y, want, reduction)
    dy = torch.randn(want.shape).to(y.dtype)
    wanted = torch.autograd.grad(want, exact, dy.double())
    for got, right in zip(torch.autograd.grad(y, inputs, dy.to("tpu")), wanted, strict=True):
        assert_close(got, right, reduction)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [(40,), (2, 3), (), (1, 1)])
def test_linear(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    check(F.linear, randn(*leading, 300, dtype=dtype), randn(70, 300, dtype=dtype), randn(70, dtype=dtype))
    assert served("tpukern::linear") == ["linear"]
    assert served("tpukern::linear_backward") == ["linear_backward"]


def test_linear_without_bias() -> None:
    check(F.linear, randn(2, 5, 64), randn(70, 64))
    assert served("tpukern::matmul_nt") == ["matmul_nt"]
    assert served("tpukern::matmul_nt_backward") == ["matmul_nt_backward"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_mm_takes_transposed_views_as_they_are(dtype: torch.dtype) -> None:
    a, b = randn(40, 300, dtype=dtype), randn(300, 70, dtype=dtype)
    check(torch.mm, a, b)
    assert sorted(served("aten::mm")) == ["matmul", "matmul_nt", "matmul_tn"]  # forward, and the gradients of a and b


def test_mm_of_two_transposed_views() -> None:
    check(lambda a, b: a.t() @ b.t(), randn(64, 5), randn(7, 64))


def test_addmm() -> None:
    check(lambda b, x, w: torch.addmm(b, x, w.t()), randn(70), randn(5, 64), randn(70, 64))
    assert served("aten::addmm") == ["linear"]


REFUSALS: list[tuple[Callable[..., torch.Tensor], str, str]] = [
    (lambda b, x, w: torch.addmm(b, x, w.t(), beta=2), "addmm", "beta is 2 and alpha 1, the kernel has 1 and 1"),
    (
        lambda b, x, w: torch.addmm(b, x, w.t().contiguous()),
        "addmm",
        "mat2 is not the transposed view of a row-major weight",
    ),
    (
        lambda b, x, w: torch.addmm(b[:1], x, w.t()),
        "addmm",
        "the bias has shape [1], the kernel takes one value a column",
    ),
    (lambda b, x, w: torch.mm(x[:0], w.t()), "mm", "an operand is empty"),
    (
        lambda b, x, w: torch.mm(x.half(), w.half().t()).float(),
        "mm",
        "an operand is torch.float16, the kernel has float32 and bfloat16",
    ),
    (lambda b, x, w: F.linear(x, w[0]), "linear", "the weight has rank 1, the kernel takes 2"),
]


@pytest.mark.parametrize(("call", "op", "reason"), REFUSALS, ids=[reason for _, _, reason in REFUSALS])
def test_refusals(call: Callable[..., torch.Tensor], op: str, reason: str) -> None:
    b, x, w = randn(70), randn(5, 64), randn(70, 64)
    got = call(b, x, w)
    want = call(*(t.detach().cpu() for t in (b, x, w)))
    torch.testing.assert_close(got.detach().cpu(), want, rtol=1e-2, atol=1e-2)
    assert reason in served(f"aten::{op}")


def test_linear_under_autocast() -> None:
    x, w, b = randn(5, 64), randn(70, 64), randn(70)
    with torch.autocast("tpu", dtype=torch.bfloat16):
        y = F.linear(x, w, b)
    assert y.dtype == torch.bfloat16
    assert_close(y, F.linear(*(t.detach().cpu().bfloat16().double() for t in (x, w, b))), 64)
    assert [g.dtype for g in torch.autograd.grad(y.float().sum(), (x, w, b))] == [torch.float32] * 3
    assert served("tpukern::linear") == ["linear"]


def test_linear_compiled() -> None:
    x, w, b = randn(2, 5, 64), randn(70, 64), randn(70)
    torch._dynamo.reset()
    check(F.linear, x, w, b, compiled=torch.compile(F.linear, backend="tpu", fullgraph=True))
    assert served("tpukern::linear") == ["linear"]
    assert served("tpukern::linear_backward") == ["linear_backward"]


def test_opt_in_only() -> None:
    tpukern.enable()
    explanation.reset()
    F.linear(randn(5, 64), randn(70, 64))
    assert served("aten::linear") == []
    assert ("aten::linear", "opt-in, not asked for") in explanation.explain().left_out
