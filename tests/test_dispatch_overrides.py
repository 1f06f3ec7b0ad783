"""Overrides of ATen ops: which are installed, what they take and leave, and that nothing of them stays."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import pytest
import torch

import tpukern
import tpukern.kernels  # declares those that ship, before the list of the declared is exchanged
from tpukern import explanation
from tpukern.dsl import Block, Dim, In, Out, Override, Ref, declared, kernel
from tpukern.errors import OverrideError, SignatureError
from tpukern.registry import REGISTRY

pytestmark = pytest.mark.filterwarnings("ignore:<TorchTpu/")

SEEN: list[str] = []  # what cond and impl of the kernels below were called with


def larger_cond(self: torch.Tensor, other: torch.Tensor) -> str | None:
    SEEN.append("cond")
    return "shapes differ" if self.shape != other.shape else "three rows" if self.shape[0] == 3 else None


def larger_impl(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    SEEN.append("impl")
    return larger.launch(self, other)


@kernel(op="dispatch_overrides::larger", overrides=[Override("aten::maximum", impl=larger_impl, cond=larger_cond)])
def larger(x: Ref = In("m n"), y: Ref = In("m n"), z: Ref = Out("m n"), *, m: Dim = Block(8)) -> None:
    """One more than ATen's, so that a test sees whose it was."""
    z[...] = jnp.maximum(x[...], y[...]) + 1


def softplus_impl(self: torch.Tensor, beta: float, threshold: float) -> torch.Tensor:
    return softplus.launch(self, beta=float(beta), threshold=float(threshold)).neg()


@kernel(op="dispatch_overrides::softplus", overrides=[Override("aten::softplus", impl=softplus_impl, opt_in=True)])
def softplus(x: Ref = In("m n"), y: Ref = Out("m n"), *, beta: float = 1.0, threshold: float = 20.0, m: Dim = Block(8)) -> None:
    y[...] = x[...] * beta + threshold


def strided_impl(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    order = tuple(sorted(range(self.dim()), key=self.stride, reverse=True))
    return smaller.launch(self, other, layouts={"z": order})


@kernel(op="dispatch_overrides::smaller", overrides=[Override("aten::minimum", impl=strided_impl)])
def smaller(x: Ref = In("m n"), y: Ref = In("m n"), z: Ref = Out("m n"), *, m: Dim = Block(8)) -> None:
    z[...] = 10 * jnp.minimum(x[...], y[...])


MINE = (larger, softplus, smaller)
for mine in MINE:
    declared._KERNELS.remove(mine)  # no business of other tests in this process


@pytest.fixture(autouse=True)
def _clean(tpu: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(declared, "_KERNELS", [*declared._KERNELS, *MINE])
    SEEN.clear()
    explanation.reset()
    yield
    tpukern.disable()


def pair(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((rows, 16), 3.0, device="tpu"), torch.full((rows, 16), 4.0, device="tpu")


def value(x: torch.Tensor) -> float:
    return float(x.cpu().max())


def rows_of(op: str) -> list[tuple[str, int, str]]:
    return [(row.kernel, row.calls, row.reason) for row in explanation.explain().rows if row.op == op]


def test_a_call_is_taken_or_left_with_the_reason() -> None:
    assert tpukern.enable(only=["larger"]) == tpukern.device_kind()
    assert value(torch.maximum(*pair())) == 5.0
    assert value(torch.maximum(*pair(3))) == 4.0
    assert value(torch.maximum(pair()[0], pair(1)[1])) == 4.0
    assert rows_of("aten::maximum") == [("larger", 1, ""), ("", 1, "three rows"), ("", 1, "shapes differ")]


def test_calls_that_are_alike_are_decided_once_and_counted_each() -> None:
    tpukern.enable(only=["larger"])
    for _ in range(5):
        assert value(torch.maximum(*pair())) == 5.0
        assert value(torch.maximum(*pair(3))) == 4.0
    assert SEEN == ["cond", "impl", "cond"]
    assert rows_of("aten::maximum") == [("larger", 5, ""), ("", 5, "three rows")]


def test_other_values_of_the_same_kind_are_not_mixed_up() -> None:
    tpukern.enable(only=["larger"])
    x, y = pair()
    assert value(torch.maximum(x, x)) == 4.0
    assert value(torch.maximum(x, y)) == 5.0
    assert value(torch.maximum(y, y)) == 5.0
    assert value(torch.maximum(y, x)) == 5.0
    assert value(torch.maximum(2 * x, 2 * y)) == 9.0


def test_what_impl_does_after_the_launch_is_done_each_time() -> None:
    tpukern.enable(only=["softplus"], opt_in=["softplus"])
    x = torch.ones(8, 16, device="tpu")
    for _ in range(3):
        assert value(torch.nn.functional.softplus(x, beta=2, threshold=5)) == -7.0
    assert value(torch.nn.functional.softplus(x)) == -21.0  # defaults of the schema, which the dispatcher leaves out


def test_strides_tell_calls_apart() -> None:
    tpukern.enable(only=["smaller"])
    x, y = pair()
    for _ in range(2):
        assert torch.minimum(x, y).stride() == (16, 1)
        turned = torch.full((16, 8), 3.0, device="tpu").T
        found = torch.minimum(turned, y)
        assert (found.stride(), value(found)) == ((1, 8), 30.0)


def test_disable_gives_the_native_kernels_back() -> None:
    native = torch.library.get_kernel("aten::maximum", "PrivateUse1")
    tpukern.enable(only=["larger"])
    tpukern.disable()
    assert value(torch.maximum(*pair())) == 4.0
    assert str(torch.library.get_kernel("aten::maximum", "PrivateUse1")) == str(native)
    assert rows_of("aten::maximum") == []
    tpukern.enable(only=["larger"])
    assert value(torch.maximum(*pair())) == 5.0


def test_enabling_again_chooses_anew() -> None:
    tpukern.enable(only=["larger"])
    tpukern.enable(off=["aten::maximum"])
    assert value(torch.maximum(*pair())) == 4.0
    left_out = dict(explanation.explain().left_out)
    assert (left_out["aten::addmm"], left_out["aten::maximum"]) == ("opt-in, not asked for", "off")


def test_names_of_kernels_ops_and_aten_ops_are_understood() -> None:
    def installed(**keywords: Any) -> set[str]:
        tpukern.enable(**keywords)
        return {op for op, _ in REGISTRY.active}

    rms_norm = {"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"}
    assert installed(only="larger") == {"aten::maximum"}
    assert installed(only=["dispatch_overrides::larger"]) == {"aten::maximum"}
    assert installed(only=["_fused_rms_norm_backward"]) == rms_norm  # forward and backward together
    assert installed(only=["softplus"]) == set()
    assert installed(only=["larger"], opt_in=["softplus"]) == {"aten::maximum", "aten::softplus"}
    everything = installed(opt_in="all")
    assert {"aten::mm", "aten::linear", "aten::softplus", "aten::maximum", *rms_norm} <= everything
    assert installed(off=["aten::_fused_rms_norm"], opt_in="all") == everything - rms_norm


def test_an_unknown_name() -> None:
    tpukern.enable(only=["larger"])
    with pytest.raises(OverrideError) as caught:
        tpukern.enable(only=["largerr"])
    known = {name for k in declared.kernels() for o in k.overrides for name in (k.name, o.op)}
    assert str(caught.value) == (
        f"enable[override]: no override 'largerr'; expected one of {sorted(known)}. Did you mean 'larger'."
    )
    assert value(torch.maximum(*pair())) == 5.0  # what was enabled still is


def test_an_unknown_name_is_refused_before_the_device_starts() -> None:
    program = """
        import sys, tpukern
        try:
            tpukern.enable(only=["rms_nrm"])
        except tpukern.OverrideError as error:
            assert str(error).endswith("Did you mean 'rms_norm'."), error
        from tpukern import device
        assert device.started() is None and "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_threads_that_call_one_override_at_once() -> None:
    """What one thread launches is not taken for what another's override did, nor kept for ever."""
    tpukern.enable(only=["larger"])
    inputs = [(torch.full((n, 8), 3.0, device="tpu"), torch.full((n, 8), 4.0, device="tpu")) for n in range(4, 28)]
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda pair: torch.maximum(*pair), inputs * 2))
    assert [tuple(r.shape) for r in results] == [(n, 8) for n in range(4, 28)] * 2
    assert {value(r) for r in results} == {5.0}


def test_two_kernels_for_one_op_are_refused() -> None:
    @kernel(overrides=[Override("aten::maximum", impl=larger_impl, opt_in=True)])
    def larger_too(x: Ref = In("m n"), y: Ref = In("m n"), z: Ref = Out("m n"), *, m: Dim = Block(8)) -> None:
        z[...] = x[...]

    with pytest.raises(OverrideError) as caught:
        tpukern.enable(only=["larger", "larger_too"], opt_in=["larger_too"])
    assert str(caught.value) == (
        "enable[override]: kernels larger and larger_too both override aten::maximum; expected one override for each op. "
        "Leave one out: enable(off=['larger_too'])."
    )
    assert value(torch.maximum(*pair())) == 4.0


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (
            "aten::maximum",
            "bad[override]: impl of the override of aten::maximum cannot be called as the op is: too many positional "
            "arguments; expected aten::maximum(Tensor self, Tensor other).",
        ),
        ("aten::no_such_op", "bad[override]: no op 'aten::no_such_op'; expected an op of PyTorch's, as aten::mm."),
    ],
)
def test_an_override_that_cannot_be_installed_installs_none(op: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpukern import overriding

    @kernel(name="bad", op="dispatch_overrides::bad", overrides=[Override(op, impl=lambda self: self, opt_in=True)])
    def bad(x: Ref = In("m n"), z: Ref = Out("m n"), *, m: Dim = Block(8)) -> None:
        z[...] = x[...]

    chosen = [(k, o) for k in (smaller, bad) for o in k.overrides]
    monkeypatch.setattr(overriding, "choose", lambda **_: (chosen, {}))
    with pytest.raises(OverrideError) as caught:
        tpukern.enable()
    assert str(caught.value) == message
    assert REGISTRY.active == {}
    assert value(torch.minimum(*pair())) == 3.0


def test_operands_on_different_devices() -> None:
    tpukern.enable(only=["larger"])
    x, y = pair()
    message = "larger[signature]: aten::maximum got self on tpu, other on cpu; expected all tensors on one device."
    with pytest.raises(SignatureError) as first:
        torch.maximum(x, y.cpu())
    torch.maximum(x, y)
    with pytest.raises(SignatureError) as again:  # a kind of call that is known
        torch.maximum(x, y.cpu())
    assert (str(first.value), str(again.value)) == (message, message)


def test_a_raising_impl_raises_its_own_error_and_leaves_no_trace() -> None:
    def raising(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("mine")

    @kernel(op="dispatch_overrides::raises", overrides=[Override("aten::fmax", impl=raising, opt_in=True)])
    def raises(x: Ref = In("m n"), z: Ref = Out("m n"), *, m: Dim = Block(8)) -> None:
        z[...] = x[...]

    tpukern.enable(only=["raises"], opt_in=["raises"])
    with pytest.raises(ZeroDivisionError, match="mine"):
        torch.fmax(*pair())
    explanation.reset()
    larger.launch(*pair())
    assert [row.op for row in explanation.explain().rows] == ["dispatch_overrides::larger"]
