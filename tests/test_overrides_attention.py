"""Attention in the place of ATen's, through `scaled_dot_product_attention` on the tpu device."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tpukern
from tpukern import explanation, routing
from tpukern.errors import SignatureError
from tpukern.kernels import flash_attention
from tpukern.kernels.flash_attention import unsupported

pytestmark = [
    pytest.mark.filterwarnings("ignore:<TorchTpu/"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # torch_tpu looks at it
]
aten = torch.ops.aten
CUDNN = "aten::_scaled_dot_product_cudnn_attention"
OVERRIDEABLE = "aten::_scaled_dot_product_fused_attention_overrideable"


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    torch.set_num_threads(1)  # two threads beside XLA are slower by far
    torch.manual_seed(0)
    tpukern.enable(only=["flash_attention"])
    explanation.reset()
    yield
    tpukern.disable()


def randn(*shape: int, dtype: torch.dtype = torch.float32, heads_last: bool = False) -> torch.Tensor:
    """Returns a leaf on the device; `heads_last`: as a view of (..., sequence, heads, d), which is how models make it."""
    if heads_last:
        shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
    x = torch.randn(shape, dtype=dtype).to("tpu")
    return (x.transpose(-2, -3) if heads_last else x).requires_grad_()


def kernels_of(op: str) -> list[str]:
    """Returns what served the calls of an op: kernels, or reasons in their place."""
    return [row.kernel or row.reason for row in explanation.explain().rows if row.op == op]


def worst_ulps(got: torch.Tensor, want: torch.Tensor) -> float:
    right = want.detach()
    error = (got.detach().cpu().double() - right).abs().max() / right.abs().max().clamp(min=1e-3)
    return float(error) / torch.finfo(got.dtype).eps


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dy: torch.Tensor | None = None, **keywords: Any) -> None:
    """Compares output and gradients with ATen's in float64 on the CPU, and strides with what ATen promises."""
    y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **keywords)
    dy = torch.randn(y.shape, dtype=y.dtype).to("tpu") if dy is None else dy
    gradients = torch.autograd.grad(y, (q, k, v), dy)
    exact = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    want = F.scaled_dot_product_attention(*exact, enable_gqa=True, **keywords)
    wanted = torch.autograd.grad(want, exact, dy.cpu().double())
    tolerance = flash_attention.tolerance[str(q.dtype).removeprefix("torch.")]
    assert worst_ulps(y, want) <= tolerance
    for name, got, gradient, x in zip("qkv", gradients, wanted, (q, k, v), strict=True):
        assert worst_ulps(got, gradient) <= tolerance, f"d{name}"
        assert got.stride() == x.stride(), f"d{name}"
        assert got.dtype == x.dtype
    if v.shape[-1] == q.shape[-1]:
        assert y.stride() == torch.empty_like(q).stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads_last", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_float64(dtype: torch.dtype, heads_last: bool, causal: bool) -> None:
    q = randn(2, 4, 40, 64, dtype=dtype, heads_last=heads_last)
    k, v = (randn(2, 2, 40, 64, dtype=dtype, heads_last=heads_last) for _ in range(2))
    check(q, k, v, is_causal=causal)
    assert kernels_of(CUDNN) == ["flash_attention"]
    assert kernels_of(f"{CUDNN}_backward") == ["flash_attention_backward"]


@pytest.mark.parametrize(
    ("q_shape", "k_shape", "dv", "causal", "op"),
    [
        ((2, 4, 33, 80), (2, 1, 57, 80), 48, True, CUDNN),  # one key head, more keys, narrower values
        ((2, 4, 57, 32), (2, 4, 33, 32), 96, True, CUDNN),  # fewer keys, wider values
        ((1, 2, 300, 64), (1, 2, 300, 64), 64, True, CUDNN),  # batch 1, several blocks on no chip's border
        ((1, 1, 1, 64), (1, 1, 1, 64), 64, True, CUDNN),  # one query, one key
        ((2, 4, 1, 128), (2, 2, 70, 128), 128, False, CUDNN),  # decoding
        ((2, 2, 40, 160), (2, 2, 40, 160), 160, True, OVERRIDEABLE),  # ATen takes these head sizes elsewhere
        ((1, 2, 40, 256), (1, 2, 40, 256), 192, True, CUDNN),
    ],
)
def test_shapes(q_shape: tuple[int, ...], k_shape: tuple[int, ...], dv: int, causal: bool, op: str) -> None:
    check(randn(*q_shape), randn(*k_shape), randn(*k_shape[:-1], dv), is_causal=causal)
    assert kernels_of(op) == ["flash_attention"]
    assert kernels_of(f"{op}_backward") == ["flash_attention_backward"]


def test_scale_and_leading_axes() -> None:
    q, k, v = (randn(2, 3, heads, 20, 64) for heads in (4, 2, 2))
    check(q, k, v, is_causal=True, scale=0.3)
    assert kernels_of(CUDNN) == ["flash_attention"]


def test_gradient_of_stride_zero() -> None:
    q, k, v = (randn(1, 2, 20, 64, heads_last=True) for _ in range(3))
    dy = torch.ones((), device="tpu").expand(1, 2, 20, 64)
    assert dy.stride() == (0, 0, 0, 0)
    check(q, k, v, dy=dy, is_causal=True)


def test_views_of_one_projection() -> None:
    """Queries, keys and values cut out of one tensor are neither dense nor in order."""
    qkv = torch.randn(2, 20, 3, 2, 64).to("tpu").requires_grad_()
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert y.stride() == torch.empty_like(q).stride()
    (gradient,) = torch.autograd.grad(y.sum(), qkv)
    exact = qkv.detach().cpu().double().requires_grad_()
    want = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in exact.unbind(2)), is_causal=True)
    (wanted,) = torch.autograd.grad(want.sum(), exact)
    assert worst_ulps(y, want) <= flash_attention.tolerance["float32"]
    assert worst_ulps(gradient, wanted) <= flash_attention.tolerance["float32"]


def test_statistics_are_a_logsumexp() -> None:
    q, k, v = (randn(2, heads, 20, 64).detach() for heads in (4, 2, 2))
    scores = q.cpu().double() @ k.cpu().double().repeat_interleave(2, 1).mT / 8
    want = torch.logsumexp(scores, -1)
    lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[1]
    assert lse.shape == (2, 4, 20, 1)
    assert worst_ulps(lse[..., 0], want) <= 4
    lse = aten._scaled_dot_product_fused_attention_overrideable(q, k, v)[1]
    assert lse.shape == (2, 4, 20)
    assert worst_ulps(lse, want) <= 4


def test_autocast() -> None:
    q, k, v = (randn(1, 2, 20, 64) for _ in range(3))
    with torch.autocast("tpu", dtype=torch.bfloat16):
        y = F.scaled_dot_product_attention(q, k, v)
    assert y.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(y.float().sum(), (q, k, v)))
    want = F.scaled_dot_product_attention(*(x.detach().cpu().bfloat16().double() for x in (q, k, v)))
    assert worst_ulps(y, want) <= flash_attention.tolerance["bfloat16"]
    assert kernels_of(CUDNN) == ["flash_attention"]


@pytest.mark.parametrize("heads_last", [False, True])
@pytest.mark.parametrize("dv", [64, 32])
def test_compiled(heads_last: bool, dv: int) -> None:
    """The model's `view` after attention needs the promised strides, in the graph of the backward pass too."""
    q = randn(2, 4, 20, 64, heads_last=heads_last)
    k, v = randn(2, 2, 20, 64, heads_last=heads_last), randn(2, 2, 20, dv, heads_last=heads_last)

    views = heads_last

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        return (y.view(2, 20, 4 * dv) if views else y.reshape(2, 20, 4 * dv)).square()

    torch._dynamo.reset()
    y = torch.compile(attend, backend="tpu", fullgraph=True)(q, k, v)
    gradients = torch.autograd.grad(y.sum(), (q, k, v))
    exact = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    views = False  # the CPU's kernel promises other strides
    want = attend(*exact)
    wanted = torch.autograd.grad(want.sum(), exact)
    tolerance = flash_attention.tolerance["float32"]
    for got, right in zip((y, *gradients), (want, *wanted), strict=True):
        assert worst_ulps(got, right) <= tolerance
    assert kernels_of(CUDNN) == ["flash_attention"]
    assert kernels_of(f"{CUDNN}_backward") == ["flash_attention_backward"]


REFUSED = [
    ("there is a mask", {"attn_mask": True}),
    ("dropout_p is 0.5", {"dropout_p": 0.5}),
]


@pytest.mark.parametrize(("reason", "what"), REFUSED)
def test_refused_in_both_directions(reason: str, what: dict[str, Any]) -> None:
    q, k, v = (randn(2, 2, 20, 64) for _ in range(3))
    keywords = dict(what)
    mask = torch.ones(20, 20).tril().bool()
    if "attn_mask" in keywords:
        keywords["attn_mask"] = mask.to("tpu")
    y = F.scaled_dot_product_attention(q, k, v, **keywords)
    gradients = torch.autograd.grad(y.sum(), (q, k, v))
    assert reason in kernels_of(CUDNN)
    assert "flash_attention" not in kernels_of(CUDNN)
    assert "flash_attention_backward" not in kernels_of(f"{CUDNN}_backward")
    if "attn_mask" in keywords:
        exact = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
        want = F.scaled_dot_product_attention(*exact, attn_mask=mask)
        wanted = torch.autograd.grad(want.sum(), exact)
        for got, right in zip((y, *gradients), (want, *wanted), strict=True):
            assert worst_ulps(got, right) <= 64


FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("shapes", "dtypes", "reason"),
    [
        ([(1, 2, 4, 8)] * 3, [FLOAT16] * 3, "the query is torch.float16, the kernel has float32 and bfloat16"),
        (
            [(1, 2, 4, 8)] * 3,
            [torch.float32, BFLOAT16, torch.float32],
            "query, key and value are torch.float32, torch.bfloat16 and torch.float32",
        ),
        ([(1, 2, 4, 8), (2, 4, 8), (2, 4, 8)], [BFLOAT16] * 3, "query, key and value have ranks 4, 3 and 3"),
        ([(2, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)], [BFLOAT16] * 3, "batch axes [2], [1] and [1] differ"),
        (
            [(1, 4, 4, 8), (1, 2, 4, 8), (1, 4, 4, 8)],
            [BFLOAT16] * 3,
            "there are 2 key heads and 4 value heads",
        ),
        ([(1, 2, 0, 8), (1, 2, 4, 8), (1, 2, 4, 8)], [BFLOAT16] * 3, "an input is empty"),
        ([(1, 3, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)], [BFLOAT16] * 3, "3 query heads are no multiple of 2 key heads"),
        ([(1, 2, 4, 8)] * 2 + [(1, 2, 4, 264)], [BFLOAT16] * 3, "a head dimension is 264, the kernel takes up to 256"),
    ],
)
def test_reasons(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], reason: str) -> None:
    q, k, v = (torch.empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
    assert unsupported(q, k, v, None, 0.0) == reason


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            [(1, 2, 4, 8), (1, 2, 4, 9), (1, 2, 4, 8)],
            'flash_attention[signature]: dim \'d\' is 9 on k "*b hk j d" but 8 on q "*b (hk g) i d"; expected one size.',
        ),
        (
            [(1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 5, 8)],
            'flash_attention[signature]: dim \'j\' is 5 on v "*b hk j e" but 4 on k "*b hk j d"; expected one size.',
        ),
    ],
)
def test_sizes_that_fit_no_kernel(shapes: list[tuple[int, ...]], message: str) -> None:
    q, k, v = (torch.zeros(shape, device="tpu") for shape in shapes)
    with pytest.raises(SignatureError) as caught:
        F.scaled_dot_product_attention(q, k, v)
    assert str(caught.value) == message


def test_training_after_inference() -> None:
    """What marks a forward pass is made once, perhaps in inference mode, and saved for backward passes ever after."""
    routing._kept_token.cache_clear()
    q = randn(1, 2, 20, 64)
    with torch.inference_mode():
        F.scaled_dot_product_attention(q, q, q)
    F.scaled_dot_product_attention(q, q, q).sum().backward()
    assert kernels_of(f"{CUDNN}_backward") == ["flash_attention_backward"]


def test_disabling_between_forward_and_backward() -> None:
    """What our forward pass saved goes to our backward pass, and ATen's to ATen's, whatever was switched in between."""
    q, k, v = (randn(1, 2, 20, 160) for _ in range(3))
    exact = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(F.scaled_dot_product_attention(*exact).sum(), exact)
    ours = F.scaled_dot_product_attention(q, k, v)
    tpukern.disable()
    theirs = F.scaled_dot_product_attention(q, k, v)
    assert type(theirs) is torch.Tensor
    for got, right in zip(torch.autograd.grad(ours.sum(), (q, k, v)), wanted, strict=True):
        assert worst_ulps(got, right) <= 64
    tpukern.enable(only=["flash_attention"])
    for got, right in zip(torch.autograd.grad(theirs.sum(), (q, k, v)), wanted, strict=True):
        assert worst_ulps(got, right) <= 64
    assert kernels_of(f"{OVERRIDEABLE}_backward") == ["flash_attention_backward", "the forward pass was ATen's own"]
