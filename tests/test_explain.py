"""`tpukern.explain`: rows, reasons, bounds, and that looking costs nothing."""

from collections.abc import Iterator

import jax.numpy as jnp
import pytest
import torch

import tpukern
from tpukern import explanation, launching, overriding, routing
from tpukern.dsl import Block, Dim, In, Out, Override, Ref, declared, kernel
from tpukern.explanation import Row
from tpukern.kernels import rms_norm
from tpukern.registry import REGISTRY

pytestmark = [pytest.mark.filterwarnings("ignore:<TorchTpu/"), pytest.mark.filterwarnings("ignore:The .grad attribute")]


def refusing(self: torch.Tensor, other: torch.Tensor) -> str:
    return f"it has {self.shape[0]} rows"


def never(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    raise AssertionError


@kernel(op="explain::doubled", overrides=[Override("aten::maximum", impl=never, cond=refusing)])
def doubled(x: Ref = In("m n"), y: Ref = Out("m n"), *, m: Dim = Block(8, 16, default=8)) -> None:
    y[...] = x[...] * 2


@doubled.backward
def doubled_backward(dy):  # type: ignore[no-untyped-def]
    return {"dx": jnp.multiply(dy, 2)}


declared._KERNELS.remove(doubled)  # its override is no business of other tests in this process


@pytest.fixture(autouse=True)
def _clean(tpu: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(declared, "_KERNELS", [*declared._KERNELS, doubled])
    tpukern.disable()
    explanation.reset()
    yield
    tpukern.disable()
    explanation.reset()


def test_nothing_was_called() -> None:
    assert str(tpukern.explain()) == "No op with a kernel was called."
    tpukern.enable(only=["rms_norm"])
    assert str(tpukern.explain()).splitlines()[:2] == [
        "No op with a kernel was called.",
        "aten::_log_softmax: opt-in, not asked for",
    ]


def test_rows_of_an_op_on_each_device(tpu: str) -> None:
    for device, times in (("cpu", 1), ("tpu", 2)):
        for _ in range(times):
            x = torch.ones(20, 4, device=device).detach().requires_grad_()
            doubled(x).sum().backward()
    common = {"config": "block_m=16", "reason": ""}
    assert [row for row in tpukern.explain().rows if row.direction == "forward"] == [
        Row(op="explain::doubled", kernel="doubled", direction="forward", calls=2, device=tpu, **common),
        Row(op="explain::doubled", kernel="doubled", direction="forward", calls=1, device="cpu", **common),
    ]
    assert [(row.op, row.calls, row.device) for row in tpukern.explain().rows if row.direction == "backward"] == [
        ("explain::doubled_backward", 2, tpu),
        ("explain::doubled_backward", 1, "cpu"),
    ]


def test_rows_of_an_override_and_the_table(tpu: str) -> None:
    tpukern.enable(only=["rms_norm"])
    x, w = torch.ones(8, 32, device="tpu").detach().requires_grad_(), torch.ones(32, device="tpu")
    torch.nn.functional.rms_norm(x, (32,), w, 1e-5).sum().backward()
    torch.nn.functional.rms_norm(x.detach().half(), (32,), w.half(), 1e-5)
    reason = "the input is torch.float16, the kernel has float32 and bfloat16"
    rows = {(row.op, row.kernel, row.direction, row.reason): row for row in tpukern.explain().rows}
    assert ("aten::_fused_rms_norm", "rms_norm", "forward", "") in rows
    assert ("aten::_fused_rms_norm_backward", "rms_norm_backward", "backward", "") in rows
    assert rows["aten::rms_norm", "rms_norm", "forward", ""].calls == 1
    assert rows["aten::rms_norm", "", "forward", reason].calls == 1
    head, *lines = str(tpukern.explain()).splitlines()
    assert head.split() == ["op", "kernel", "direction", "calls", "device", "config", "origin", "reason"]
    assert lines[0].split() == ["aten::_fused_rms_norm", "rms_norm", "forward", "1", tpu, "block_r=8"]
    assert any(line.endswith(reason) for line in lines)
    assert "aten::mm: opt-in, not asked for" in lines


def test_reset_sets_counts_to_zero_and_counting_goes_on() -> None:
    x = torch.ones(8, 4, device="tpu")
    doubled(x)
    explanation.reset()
    assert tpukern.explain().rows == ()
    doubled(x)
    assert [row.calls for row in tpukern.explain().rows] == [1]


def test_reasons_are_bounded() -> None:
    tpukern.enable(only=["doubled"])
    for rows in range(1, overriding.MOST_REASONS + 11):
        torch.maximum(torch.ones(rows, 1, device="tpu"), torch.ones(1, device="tpu"))
    found = {row.reason: row.calls for row in tpukern.explain().rows}
    assert len(found) == overriding.MOST_REASONS + 1
    assert found["it has 1 rows"] == 1
    assert found[overriding.OTHER_REASONS] == 10


def test_plans_are_bounded_and_their_counts_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "MOST_PLANS", 8)
    launcher = launching.launcher(doubled, on_cpu=True)
    for rows in range(1, 25):
        doubled(torch.ones(rows, 4))
        assert len(launcher.plans) <= 8
    assert sum(row.calls for row in tpukern.explain().rows) == 24


def test_kinds_of_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MOST_KNOWN", 4)
    tpukern.enable(only=["doubled"])
    for rows in range(1, 15):
        torch.maximum(torch.ones(rows, 1, device="tpu"), torch.ones(1, device="tpu"))
    assert sum(row.calls for row in tpukern.explain().rows) == 14


def test_counts_of_overrides_outlive_disable_where_a_backward_pass_stays() -> None:
    tpukern.enable(only=["flash_attention"])
    q = torch.randn(1, 2, 16, 32).to("tpu").requires_grad_()
    torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    tpukern.disable()
    assert {row.op for row in tpukern.explain().rows} == {
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_cudnn_attention_backward",
    }


def test_a_launch_of_ones_own_is_the_kernels() -> None:
    rms_norm.launch(torch.ones(8, 32, device="tpu"), torch.ones(32, device="tpu"))
    assert [row.op for row in tpukern.explain().rows] == ["tpukern::rms_norm"]
    assert REGISTRY.active == {}
