"""RMSNorm in the place of ATen's, through `rms_norm` on the tpu device."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import tpukern
from tpukern import explanation
from tpukern.kernels import rms_norm
from tpukern.testing import reference, ulp

pytestmark = [
    pytest.mark.filterwarnings("ignore:<TorchTpu/"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # torch_tpu looks at it
]
aten = torch.ops.aten
FORWARD, BACKWARD = "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    torch.set_num_threads(1)  # two threads beside XLA are slower by far
    torch.manual_seed(0)
    tpukern.enable(only=["rms_norm"])
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


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    reduction = max(got.shape, default=1)  # of y over the row, of the weight's gradient over the rows
    error = ulp.worst(reference.array(got), reference.array(want), reduction=max(reduction, 64))
    assert error.ulps <= rms_norm.tolerance[str(got.dtype).removeprefix("torch.")], str(error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 100), (1, 64), (64,), (300, 128)])
def test_agrees_with_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, w = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)
    y = F.rms_norm(x, (shape[-1],), w, 1e-5)
    dy = torch.randn(shape, dtype=dtype).to("tpu")
    exact = exactly(x, w)
    want = F.rms_norm(exact[0], (shape[-1],), exact[1], 1e-5)
    assert_close(y, want)
    assert y.dtype == dtype
    wanted = torch.autograd.grad(want, exact, dy.cpu().double())
    for got, right in zip(torch.autograd.grad(y, (x, w), dy), wanted, strict=True):
        assert got.dtype == dtype
        assert_close(got, right)
    assert served(FORWARD) == ["rms_norm"]
    assert served(BACKWARD) == ["rms_norm_backward"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_weight_and_eps(dtype: torch.dtype) -> None:
    """ATen's default eps is float32's, also for bfloat16: small rows tell."""
    x = (torch.randn(5, 64) * 1e-4).to(dtype).to("tpu").requires_grad_()
    y = F.rms_norm(x, (64,))
    (exact,) = exactly(x)
    want = F.rms_norm(exact, (64,), eps=torch.finfo(torch.float32).eps)
    assert_close(y, want)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert_close(gradient, torch.autograd.grad(want.sum(), exact)[0])
    assert served(FORWARD) == ["rms_norm"]
    assert served(BACKWARD) == ["rms_norm_backward"]


def test_two_normalised_axes() -> None:
    x, w = randn(3, 4, 20), randn(4, 20)
    y, rstd = aten._fused_rms_norm(x, [4, 20], w, 1e-6)
    assert rstd.shape == (3, 1, 1)
    exact = exactly(x, w)
    want = F.rms_norm(exact[0], (4, 20), exact[1], 1e-6)
    assert_close(y, want)
    assert_close(rstd, (exact[0].square().mean((1, 2), keepdim=True) + 1e-6).rsqrt())
    wanted = torch.autograd.grad(want.sum(), exact)
    for got, right in zip(torch.autograd.grad(F.rms_norm(x, (4, 20), w, 1e-6).sum(), (x, w)), wanted, strict=True):
        assert_close(got, right)


def test_gradient_of_the_weight_alone() -> None:
    x, w = randn(3, 64).detach(), randn(64)
    y = F.rms_norm(x, (64,), w)
    (exact, weight) = exactly(x, w)
    want = F.rms_norm(exact, (64,), weight, torch.finfo(torch.float32).eps)
    assert_close(torch.autograd.grad(y.sum(), w)[0], torch.autograd.grad(want.sum(), weight)[0])


def test_strided_input() -> None:
    x, w = randn(20, 64, 3), randn(64)
    y = F.rms_norm(x.transpose(1, 2), (64,), w, 1e-6)
    exact = exactly(x, w)
    want = F.rms_norm(exact[0].transpose(1, 2), (64,), exact[1], 1e-6)
    assert_close(y, want)
    wanted = torch.autograd.grad(want.sum(), exact)
    for got, right in zip(torch.autograd.grad(y.sum(), (x, w)), wanted, strict=True):
        assert_close(got, right)


def test_statistics_are_atens() -> None:
    """Either backward pass may follow either forward pass: both keep 1 / rms."""
    x, w = randn(20, 64), randn(64)
    y, rstd = aten._fused_rms_norm(x, [64], w, 1e-6)
    ours = torch.autograd.grad(F.rms_norm(x, (64,), w, 1e-6).sum(), (x, w))
    tpukern.disable()
    explanation.reset()
    native = aten._fused_rms_norm(x, [64], w, 1e-6)
    assert served(FORWARD) == []
    assert_close(y, native[0].detach().cpu().double())
    assert_close(rstd, native[1].detach().cpu().double())
    theirs = aten._fused_rms_norm_backward(torch.ones_like(y), x, [64], rstd, w, [True, True])
    for got, right in zip(ours, theirs, strict=True):
        assert_close(got, right.detach().cpu().double())


@pytest.mark.parametrize("weight", [True, False])
def test_compiled(weight: bool) -> None:
    x, w = randn(2, 5, 64), randn(64)

    def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (64,), w if weight else None, 1e-6) * w

    torch._dynamo.reset()
    y = torch.compile(norm, backend="tpu", fullgraph=True)(x, w)
    exact = exactly(x, w)
    want = norm(*exact)
    assert_close(y, want)
    wanted = torch.autograd.grad(want.square().sum(), exact)
    for got, right in zip(torch.autograd.grad(y.square().sum(), (x, w)), wanted, strict=True):
        assert_close(got, right)
    assert served(FORWARD) == ["rms_norm"]
    assert served(BACKWARD) == ["rms_norm_backward"]


def test_autocast_leaves_mixed_types_to_aten() -> None:
    x, w = randn(5, 64), randn(64)
    with torch.autocast("tpu", dtype=torch.bfloat16):
        y = F.rms_norm(x, (64,), w)
        mixed = F.rms_norm(x.bfloat16(), (64,), w)
    exact = exactly(x, w)
    assert_close(y, F.rms_norm(exact[0], (64,), exact[1], torch.finfo(torch.float32).eps))
    assert mixed.dtype == torch.bfloat16
    assert served("aten::rms_norm") == ["rms_norm", "the weight is torch.float32, the input torch.bfloat16"]


@pytest.mark.parametrize(
    ("shape", "dtype", "normalized_shape", "reason"),
    [
        ((0, 64), torch.float32, (64,), "the input is empty"),
        ((2, 64), torch.float16, (64,), "the input is torch.float16, the kernel has float32 and bfloat16"),
    ],
)
def test_refusals(shape: tuple[int, ...], dtype: torch.dtype, normalized_shape: tuple[int, ...], reason: str) -> None:
    y = F.rms_norm(torch.ones(shape, dtype=dtype).to("tpu"), normalized_shape)
    assert y.shape == shape
    assert reason in served("aten::rms_norm")
    assert "rms_norm" not in served(FORWARD)


def test_disable_gives_the_native_kernel_back() -> None:
    x = randn(3, 64)
    before = F.rms_norm(x, (64,))
    tpukern.disable()
    explanation.reset()
    assert_close(F.rms_norm(x, (64,)), before.detach().cpu().double())
    assert explanation.explain().rows == ()
