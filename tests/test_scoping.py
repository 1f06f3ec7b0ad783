"""`with tpukern.overrides(...)`: what a scope leaves out, in which thread, and which way its backward passes go."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

import tpukern
from tpukern import explanation, scoping
from tpukern.errors import OverrideError

pytestmark = [pytest.mark.filterwarnings("ignore:<TorchTpu/"), pytest.mark.filterwarnings("ignore:The .grad attribute")]

FORWARD, BACKWARD = "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"
CUDNN = "aten::_scaled_dot_product_cudnn_attention"


@pytest.fixture(autouse=True)
def _clean(tpu: str) -> Iterator[None]:
    torch._dynamo.reset()
    tpukern.enable(only=["rms_norm", "flash_attention", "softmax"], opt_in=["softmax"])
    explanation.reset()
    yield
    tpukern.disable()
    torch._dynamo.reset()


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(s, generator=generator).to("tpu").requires_grad_() for s in ((6, 32), (32,)))  # type: ignore[return-value]


def fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._fused_rms_norm(x, [32], w, 1e-5)[0]


def attention(q: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    q = (q * w).view(1, 1, 6, 32)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def ran() -> dict[str, list[str]]:
    """Returns, for each op, the kernels that ran, or why none did."""
    rows = explanation.explain().rows
    found = {op: sorted({row.kernel or row.reason for row in rows if row.op == op}) for op in sorted({r.op for r in rows})}
    explanation.reset()
    return found


def test_a_scope_leaves_out_what_it_says_while_it_lasts() -> None:
    x, w = operands()
    with torch.no_grad():
        with tpukern.overrides(off=["rms_norm"]):
            inside = F.rms_norm(x, (32,), w, 1e-5)
            torch.softmax(x, -1)
        assert ran() == {"aten::_softmax": ["softmax"], "aten::rms_norm": [scoping.LEFT_OUT]}
        with tpukern.overrides(only=["rms_norm"]), tpukern.overrides(off=["softmax"]):
            fused(x, w)
            torch.softmax(x, -1)
        assert ran() == {FORWARD: ["rms_norm"], "aten::_softmax": [scoping.LEFT_OUT]}
        with pytest.raises(ZeroDivisionError), tpukern.overrides(off=["rms_norm"]):
            raise ZeroDivisionError
        outside = F.rms_norm(x, (32,), w, 1e-5)
    assert ran() == {"aten::_fused_rms_norm": ["rms_norm"], "aten::rms_norm": ["rms_norm"]}
    torch.testing.assert_close(inside.cpu(), outside.cpu())
    assert (scoping.ENTERED, scoping.current()) == ([], None)


@pytest.mark.parametrize("inside", ["forward", "backward"])
@pytest.mark.parametrize(
    ("function", "forward", "kernel"),
    [
        (fused, FORWARD, "rms_norm"),
        (attention, CUDNN, "flash_attention"),
        (lambda x, w: torch.softmax(x * w, -1), "aten::_softmax", "softmax"),
    ],
    ids=["rms_norm", "attention", "softmax"],
)
def test_a_backward_pass_follows_its_forward_pass(
    function: Callable[..., torch.Tensor], forward: str, kernel: str, inside: str
) -> None:
    scope = tpukern.overrides(off=[kernel])
    x, w = operands()
    if inside == "forward":
        with scope:
            y = function(x, w)
        y.square().sum().backward()
    else:
        y = function(x, w)
        with scope:
            y.square().sum().backward()
    found = ran()
    (reason,) = [found[op][0] for op in found if op.startswith(forward) and "_backward" in op]
    assert found[forward] == [scoping.LEFT_OUT if inside == "forward" else kernel]
    assert (reason == f"{kernel}_backward") == (inside == "backward")
    a, b = (t.detach().cpu().double().requires_grad_() for t in (x, w))
    expected = F.rms_norm(a, (32,), b, 1e-5) if function is fused else function(a, b)
    expected.square().sum().backward()
    for mine, theirs in ((x, a), (w, b)):
        assert mine.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad.cpu().double(), theirs.grad, rtol=1e-4, atol=1e-4)


def test_a_scope_is_of_its_thread_and_of_what_autograd_does_for_it() -> None:
    x, w = operands()
    entered, called = threading.Event(), threading.Event()

    def other() -> None:
        with tpukern.overrides(off=["rms_norm"]):
            entered.set()
            assert called.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(60)
    y = fused(x, w)
    called.set()
    thread.join()
    assert ran() == {FORWARD: ["rms_norm"]}

    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, y: torch.Tensor) -> torch.Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: object, dy: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.softmax(dy, -1)

    with tpukern.overrides(off=["softmax"]):
        InBackward.apply(y).sum().backward()
    assert ran() == {BACKWARD: ["rms_norm_backward"], "aten::_softmax": [scoping.LEFT_OUT]}


@pytest.mark.parametrize("kernel", ["rms_norm", "flash_attention"])
def test_a_compiled_function_has_a_graph_for_each_scope(kernel: str) -> None:
    function = {"rms_norm": lambda x, w: F.rms_norm(x, (32,), w, 1e-5), "flash_attention": attention}[kernel]
    compiled = torch.compile(function, fullgraph=True)
    plain, counts = [], []
    for scoped in (False, True, False, True):
        x, w = operands()
        if scoped:
            with tpukern.overrides(off=[kernel]):
                y = compiled(x, w)
        else:
            y = compiled(x, w)
        y.square().sum().backward()
        assert x.grad is not None
        plain.append(x.grad.cpu())
        said = [what for reasons in ran().values() for what in reasons]
        counts.append((kernel in said, scoping.LEFT_OUT in said))
    assert counts == [(True, False), (False, True), (False, False), (False, False)]  # made twice, then found again
    for grad in plain[1:]:
        torch.testing.assert_close(grad, plain[0], rtol=1e-4, atol=1e-5)


def test_what_is_refused() -> None:
    def message(call: Callable[[], object]) -> str:
        with pytest.raises(OverrideError) as caught:
            call()
        return str(caught.value)

    assert message(lambda: tpukern.overrides(only=["matmul"])) == (
        "overrides[override]: aten::mm is not enabled: opt-in, not asked for; expected one that is. "
        "Call tpukern.enable with it before."
    )
    assert message(lambda: tpukern.overrides(off=["rms_nrm"])).endswith("Did you mean 'rms_norm'.")
    scope = tpukern.overrides(off=["rms_norm"])
    with scope:
        for call in (tpukern.enable, tpukern.disable):
            assert message(call) == (
                f"{call.__name__}[override]: a call inside of `with tpukern.overrides(...)`; expected one outside of it."
            )
        assert message(scope.__enter__) == (
            "overrides[override]: this scope was entered before; expected one `with` for each call of overrides()."
        )
