"""Forward and backward of one op are of one making, whatever is enabled or disabled between them, eager and compiled."""

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

import tpukern
from tpukern import explanation, routing
from tpukern.errors import OverrideError
from tpukern.kernels import flash_attention
from tpukern.registry import REGISTRY

pytestmark = [pytest.mark.filterwarnings("ignore:<TorchTpu/"), pytest.mark.filterwarnings("ignore:The .grad attribute")]

aten = torch.ops.aten
FORWARD = "aten::_scaled_dot_product_fused_attention_overrideable"
BACKWARD = f"{FORWARD}_backward"
CUDNN = "aten::_scaled_dot_product_cudnn_attention"


@pytest.fixture(autouse=True)
def _clean(tpu: str) -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    tpukern.disable()
    explanation.reset()
    yield
    tpukern.disable()
    torch._dynamo.reset()


def on() -> None:
    tpukern.enable(only=["flash_attention"])


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def run(function: Callable[..., torch.Tensor], between: Callable[[], None]) -> float:
    """Returns the worst error of gradients, relative to the largest one: the wrong backward pass is off by more than 1."""
    shapes = [(2, 4, 40, 32)] * 3
    exact = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    given = [x.detach().float().to("tpu").requires_grad_() for x in exact]
    dy = torch.randn(shapes[0], dtype=torch.float64)
    wanted = torch.autograd.grad(attention(*exact), exact, dy)
    y = function(*given)
    between()
    y.backward(dy.float().to("tpu"))
    found = [x.grad for x in given if x.grad is not None]
    return max(float((f.cpu() - w).abs().max() / w.abs().max()) for f, w in zip(found, wanted, strict=True))


def served() -> dict[str, list[str]]:
    rows = explanation.explain().rows
    return {op: [row.kernel or row.reason for row in rows if row.op == op] for op in {row.op for row in rows}}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_disabling_between_the_passes(compiled: bool) -> None:
    on()
    assert run(torch.compile(attention, fullgraph=True) if compiled else attention, tpukern.disable) < 1e-4
    assert served() == {CUDNN: ["flash_attention"], f"{CUDNN}_backward": ["flash_attention_backward"]}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_enabling_between_the_passes(compiled: bool) -> None:
    assert run(torch.compile(attention, fullgraph=True) if compiled else attention, on) < 1e-4
    assert served()[f"{CUDNN}_backward"] == [routing.NATIVE_FORWARD]


def test_both_native_after_disabling() -> None:
    on()
    assert run(attention, lambda: None) < 1e-4
    tpukern.disable()
    explanation.reset()
    assert run(attention, lambda: None) < 1e-4
    assert served()[f"{CUDNN}_backward"] == [routing.NATIVE_FORWARD]  # the guard, which stays


def test_turning_one_op_off_turns_its_other_half_off() -> None:
    tpukern.enable(only=["flash_attention"], off=[BACKWARD])
    assert {op for op, _ in REGISTRY.active} == {CUDNN, f"{CUDNN}_backward"}


def test_a_recomputed_forward_pass_is_followed_by_its_own_backward_pass() -> None:
    from torch.utils.checkpoint import checkpoint

    on()
    assert run(lambda *x: checkpoint(attention, *x, use_reentrant=True), tpukern.disable) < 1e-4  # recomputed natively


def test_the_mark_is_a_tensor_of_a_shape_that_native_kernels_do_not_return() -> None:
    q, k, v = (torch.randn(1, 2, 16, 32, device="tpu") for _ in range(3))
    native = aten._scaled_dot_product_fused_attention_overrideable(q, k, v)
    on()
    ours = aten._scaled_dot_product_fused_attention_overrideable(q, k, v)
    assert [tuple(ours[at].shape) for at in (6, 7)] == [routing.TOKEN_SHAPE] * 2
    assert routing.TOKEN_SHAPE not in [tuple(native[at].shape) for at in (6, 7)]
    assert (ours[6].dtype, ours[6].device.type) == (torch.int64, "tpu")


def test_a_backward_pass_that_refuses_what_its_forward_pass_took_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        return "I will not"

    changed = [dataclasses.replace(o, cond=refuse) if o.op == f"{CUDNN}_backward" else o for o in flash_attention.overrides]
    monkeypatch.setattr(flash_attention, "overrides", tuple(changed))
    on()
    with pytest.raises(OverrideError) as caught:
        run(attention, lambda: None)
    assert str(caught.value) == (
        f"flash_attention[override]: the override of {CUDNN}_backward refuses what its forward pass took: I will not; "
        "expected conditions on what both passes see."
    )
