"""The ops that the emulated device runs in a way of its own, against the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tpukern import emulated_ops
from tpukern.errors import DeviceError

pytestmark = [pytest.mark.filterwarnings("ignore:<TorchTpu/"), pytest.mark.usefixtures("emulated")]


@pytest.fixture(autouse=True)
def emulated(tpu) -> None:
    if tpu != "emulated":
        pytest.skip("needs the emulated device")
    torch.manual_seed(0)


def compare(function: Callable[..., Any], *inputs: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Compares results and gradients with the CPU's."""
    cpu = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    ours = [x.to("tpu").requires_grad_(x.is_floating_point()) for x in inputs]
    want, got = function(*cpu), function(*ours)
    assert got.stride() == want.stride()
    torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=tolerance, atol=tolerance)
    if want.requires_grad:
        dy = torch.randn_like(want)
        want.backward(dy)
        got.backward(dy.to("tpu"))
        for place, (c, o) in enumerate(zip(cpu, ours, strict=True)):
            if c.grad is not None:
                assert o.grad is not None
                torch.testing.assert_close(o.grad.cpu(), c.grad, rtol=tolerance, atol=tolerance, msg=f"gradient {place}")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "--xla_disable_hlo_passes=associative-scan-rewriter"),
        ("--xla_a=1 --xla_b", "--xla_a=1 --xla_b --xla_disable_hlo_passes=associative-scan-rewriter"),
        ("--xla_disable_hlo_passes=dce,cse --xla_a=1", "--xla_a=1 --xla_disable_hlo_passes=dce,cse,associative-scan-rewriter"),
        (
            "--xla_disable_hlo_passes=associative-scan-rewriter",
            "--xla_disable_hlo_passes=associative-scan-rewriter",
        ),
        ("/no/such/file", "--xla_disable_hlo_passes=associative-scan-rewriter"),
    ],
)
def test_flags(before: str | None, after: str) -> None:
    assert emulated_ops.xla_flags(before) == after


def test_flags_from_a_file(tmp_path) -> None:
    (tmp_path / "flags").write_text("--xla_a=1\n--xla_b=2\n")
    after = "--xla_a=1 --xla_b=2 --xla_disable_hlo_passes=associative-scan-rewriter"
    assert emulated_ops.xla_flags(str(tmp_path / "flags")) == after


X = (5, 7)
SCANS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cumsum": lambda x: torch.cumsum(x, 0),
    "cumsum last": lambda x: torch.cumsum(x, -1),
    "cumprod": lambda x: torch.cumprod(x, 1),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 1),
    "cummax": lambda x: torch.cummax(x, 1).values,
    "cumulative_trapezoid": lambda x: torch.cumulative_trapezoid(x),
    "embedding_bag": lambda x: F.embedding_bag(at(x, 1, 2, 0, 3, 1), x, at(x, 0, 2)),
    "embedding_bag mean": lambda x: F.embedding_bag(at(x, 1, 2, 0, 3, 1), x, at(x, 0, 2), mode="mean"),
    "embedding_bag max": lambda x: F.embedding_bag(at(x, 1, 2, 0, 3, 1), x, at(x, 0, 2), mode="max"),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, at(x, 1, 2, 3, 0, 1), dim=0),
    "segment_reduce": lambda x: torch.segment_reduce(x.detach(), "sum", lengths=at(x, 3, 2)),
}


def at(like: torch.Tensor, *values: int) -> torch.Tensor:
    return torch.tensor(values, device=like.device)


@pytest.mark.parametrize("name", SCANS)
def test_scans(name: str) -> None:
    compare(SCANS[name], torch.randn(X))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool], ids=str)
def test_scans_of_integers(dtype: torch.dtype) -> None:
    compare(lambda x: torch.cumsum(x, 1), torch.randint(0, 2, X).to(dtype))


def test_scans_compiled() -> None:
    compare(torch.compile(lambda x: (torch.cumsum(x, 0) * torch.cumprod(x, 1)).relu()), torch.randn(X))


GROUPED = {
    "rows": ((12, 16), (3, 16, 8), [4, 4, 12]),
    "rows past the last group": ((12, 16), (2, 16, 8), [4, 12]),
    "columns": ((3, 8, 16), (16, 16), [4, 9, 16]),
    "summed": ((8, 16), (16, 24), [8, 8, 16]),
    "whole": ((3, 8, 16), (3, 16, 8), None),
}


@pytest.mark.parametrize("case", GROUPED)
def test_grouped_mm(case: str) -> None:
    first, second, ends = GROUPED[case]
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(a, b, offs=None if offs is None else offs.to(a.device))

    compare(product, torch.randn(first, dtype=torch.bfloat16), torch.randn(second, dtype=torch.bfloat16), tolerance=2**-7)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "case", ["plain", "causal", "grouped heads", "bias", "causal bias", "bool mask", "scale", "heads last"]
)
def test_attention(case: str, compiled: bool) -> None:
    heads = 2 if case == "grouped heads" else 4
    q, k, v = torch.randn(2, 4, 10, 32), torch.randn(2, heads, 14, 32), torch.randn(2, heads, 14, 32)
    if case == "heads last":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    keywords: dict[str, Any] = {
        "causal": {"is_causal": True},
        "grouped heads": {"enable_gqa": True},
        "bias": {"attn_mask": torch.randn(1, 1, 10, 14)},
        "causal bias": {"attn_mask": torch.randn(1, 1, 10, 14), "is_causal": True},
        "bool mask": {"attn_mask": torch.rand(10, 14) > 0.3},
        "scale": {"scale": 0.3},
    }.get(case, {})

    on = {
        place: {n: x.to(place) if isinstance(x, torch.Tensor) else x for n, x in keywords.items()} for place in ("cpu", "tpu")
    }

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, **on[q.device.type])

    compare(torch.compile(attention) if compiled else attention, q, k, v)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", ["plain", "causal", "grouped heads", "heads last"])
def test_attention_dropout(case: str, compiled: bool) -> None:
    """The gradients are those of the mask that the forward pass drew, which the values show when they are the identity."""
    heads, p = 2 if case == "grouped heads" else 4, 0.25
    q, k, v = torch.randn(2, 4, 16, 32), torch.randn(2, heads, 32, 32), torch.eye(32).expand(2, heads, 32, 32).contiguous()
    if case == "heads last":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    keywords = {"is_causal": case == "causal", "enable_gqa": case == "grouped heads"}

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: float = p) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, **keywords)

    ours = [x.to("tpu").requires_grad_() for x in (q, k, v)]
    y = (torch.compile(attention) if compiled else attention)(*ours)
    assert y.stride() == q.stride()
    cpu = [x.clone().requires_grad_() for x in (q, k, v)]
    weights = attention(cpu[0], cpu[1], torch.eye(32).expand(2, heads, 32, 32), p=0.0)
    kept = (y.detach().cpu() != 0).float()
    want = torch.matmul(weights * kept / (1 - p), cpu[2].repeat_interleave(4 // heads, dim=1))
    torch.testing.assert_close(y.detach().cpu(), want.detach(), rtol=1e-5, atol=1e-5)
    dropped = 1 - kept.sum() / (weights > 0).sum()
    assert abs(dropped.item() - p) < 0.04
    dy = torch.randn_like(want)
    y.backward(dy.to("tpu"))
    want.backward(dy)
    for ours_x, x in zip(ours, cpu, strict=True):
        assert ours_x.grad is not None
        torch.testing.assert_close(ours_x.grad.cpu(), x.grad, rtol=1e-4, atol=1e-4)
        assert ours_x.grad.stride() == ours_x.stride()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_attention_dropout_draws_anew(compiled: bool) -> None:
    q = torch.randn(1, 2, 16, 32, device="tpu")

    def attention(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    call = torch.compile(attention) if compiled else attention

    def draw() -> torch.Tensor:
        return call(q).cpu()

    torch.manual_seed(3)
    first, second = draw(), draw()
    torch.manual_seed(3)
    assert torch.equal(first, draw())
    assert not torch.equal(first, second)


def test_copies_to_the_host() -> None:
    x = torch.arange(6.0, device="tpu")
    assert x.to("cpu", non_blocking=True).tolist() == list(range(6))
    assert x.to("cpu", torch.int32, non_blocking=True).tolist() == list(range(6))
    assert torch.equal(x.to(torch.bfloat16).float().cpu(), x.cpu())
    assert torch.arange(6.0).pin_memory().to("tpu", non_blocking=True).sum().item() == 15
    data = torch.utils.data.TensorDataset(torch.arange(6.0))
    batches = [batch for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True)]
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5]]


def test_what_a_tpu_has_not_is_not_supplied() -> None:
    a = torch.ones(32, 32, dtype=torch.int8, device="tpu")
    with pytest.raises(RuntimeError, match="'aten::_int_mm' is not implemented for TPU"):
        torch._int_mm(a, a)


def reduced(x: torch.Tensor) -> torch.Tensor:
    return x.index_reduce(0, at(x, 2, 0), torch.ones(2, *x.shape[1:], device=x.device), "amax")


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
def test_a_call_that_would_end_the_process() -> None:
    compare(reduced, torch.randn(4))
    with pytest.raises(DeviceError) as caught:
        reduced(torch.zeros(4, 3, device="tpu"))
    assert str(caught.value) == (
        "aten::index_reduce[device]: a tensor of 2 dimensions, on which torch_tpu 0.2.0 ends the process; expected one "
        "dimension. Use torch.scatter_reduce with the index expanded to the source's shape."
    )


OVERRIDEABLE = "aten::_scaled_dot_product_fused_attention_overrideable"


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(1, 2, 4, 8), (1, 2, 4, 9), (1, 2, 4, 8)], "one head dimension in query and key."),
        ([(1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 5, 8)], "as many values as keys."),
        ([(3, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)], "equal batch sizes. Expand them."),
        ([(1, 4, 4, 8), (1, 2, 4, 8), (1, 4, 4, 8)], "as many value heads as key heads. Repeat them."),
    ],
)
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_attention_of_sizes_that_do_not_fit(shapes: list[tuple[int, ...]], expected: str, dropout_p: float) -> None:
    """torch_tpu's own would end the process, or say "failed to inline functions in MLIR module"."""
    q, k, v = (torch.zeros(shape, device="tpu") for shape in shapes)
    with pytest.raises(DeviceError) as caught:
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)
    op = "aten::_scaled_dot_product_cudnn_attention" if dropout_p else OVERRIDEABLE
    found = "query {}, key {}, value {}".format(*(list(shape) for shape in shapes))
    assert str(caught.value) == f"{op}[device]: {found}; expected {expected}"
