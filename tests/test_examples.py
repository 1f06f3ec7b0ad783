"""The examples run, learn, and agree across devices; the demo fails when they do not."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
TPUKERN = str(Path(sysconfig.get_path("scripts")) / "tpukern")


def load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


llama = load(EXAMPLES / "tiny_llama.py")
demo = load(ROOT / "tools" / "demo.py")

SMALL = {"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 96, "length": 32, "batch": 4}
STEPS = demo.EARLY_STEPS


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    env = os.environ | environment
    return subprocess.run(words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=590)


def curve(activation: Any = None, **changes: Any) -> list[float]:
    """The first losses of a small model on the CPU."""
    torch.manual_seed(0)
    shape = llama.Shape(**SMALL)
    model = llama.TinyLlama(shape, activation or llama.silu_times)
    for module in model.modules():
        if isinstance(module, llama.RMSNorm) and "eps" in changes:
            module.eps = changes["eps"]
    return llama.train(model, shape, "cpu", STEPS, compiled=False, beside=None)


# --- The model ---------------------------------------------------------------------------------------------------------------


def test_the_model_knows_nothing_of_tpukern() -> None:
    assert "tpukern" not in (EXAMPLES / "tiny_llama.py").read_text().lower()


def test_the_kernel_of_its_own_takes_about_20_lines() -> None:
    text = (EXAMPLES / "tiny_llama_own_kernel.py").read_text()
    written = text[text.index("@kernel") : text.index("if __name__")].strip().splitlines()
    assert len([line for line in written if line]) <= 20


def test_rotary_positions_are_relative() -> None:
    model = llama.TinyLlama(llama.Shape(**SMALL))
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 1, 16, generator=generator).expand(2, 32, 16)
    scores = llama.rotate(q, model.cos, model.sin) @ llama.rotate(k, model.cos, model.sin).T
    for offset in range(-31, 32):
        same = scores.diagonal(offset)
        torch.testing.assert_close(same, same[:1].expand_as(same), rtol=0, atol=2e-5)
    assert scores.diagonal(1)[0] != scores.diagonal(7)[0]


def test_no_position_sees_a_later_byte() -> None:
    model = llama.TinyLlama(llama.Shape(**SMALL))
    text = llama.corpus()[:32].long()[None]
    changed = text.clone()
    changed[0, 20:] = 65
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[0, :20], after[0, :20], rtol=0, atol=1e-6)
    assert not torch.allclose(before[0, 20:], after[0, 20:], atol=1e-2)


def test_the_learning_rate() -> None:
    rates = [llama.learning_rate(step, 200) for step in range(200)]
    assert rates[0] == pytest.approx(1e-4)
    assert max(rates) == pytest.approx(2e-3, rel=0.03)
    assert rates[-1] == pytest.approx(2e-4, rel=0.01)


def test_on_the_cpu_beside_itself(tmp_path: Path) -> None:
    """One seed, one curve; and the table that a reader of the demo sees."""
    script, calm = EXAMPLES / "tiny_llama.py", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    first = run(
        sys.executable, script, "--device", "cpu", "--steps", "12", "--sample", "9", "--save", "a.json", cwd=tmp_path, **calm
    )
    assert first.returncode == 0, first.stderr
    again = run(
        sys.executable, script, "--device", "cpu", "--steps", "12", "--sample", "9", "--beside", "a.json", cwd=tmp_path, **calm
    )
    assert again.returncode == 0, again.stderr
    saved = json.loads((tmp_path / "a.json").read_text())
    assert len(saved["losses"]) == 12
    assert saved["losses"][-1] < 0.8 * saved["losses"][0]
    assert saved["sample"].startswith("The statement")
    assert len(saved["sample"].encode()) >= 22
    row = rf"^ +12 +{saved['losses'][-1]:.5f} +{saved['losses'][-1]:.5f} +\+0\.0e\+00 +\d+\.\d$"
    assert re.search(row, again.stdout, re.MULTILINE), again.stdout


@pytest.mark.parametrize(
    ("script", "wanted"),
    [("tiny_llama.py", demo.MUST_RUN), ("tiny_llama_own_kernel.py", demo.MUST_RUN | demo.OWN)],
)
def test_eager_on_the_device(script: str, wanted: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    """The demo compiles; here every op goes to the device one by one."""
    reference = run(
        *(sys.executable, EXAMPLES / "tiny_llama.py", "--device", "cpu", "--steps", "3", "--sample", "9", "--save", "cpu.json"),
        cwd=tmp_path,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert reference.returncode == 0, reference.stderr
    words = ("--eager", "--steps", "3", "--sample", "9", "--save", "tpu.json", "--beside", "cpu.json")
    done = run(TPUKERN, "run", "--opt-in", "all", "--explain-json", "rows.json", EXAMPLES / script, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [json.loads((tmp_path / name).read_text())["losses"] for name in ("tpu.json", "cpu.json")]
    demo.match(*losses)
    demo.check_kernels(json.loads((tmp_path / "rows.json").read_text()), wanted)


# --- The demo's checks -------------------------------------------------------------------------------------------------------


def gelu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.gelu(gate, approximate="tanh") * up


class WrongBackward(torch.autograd.Function):
    """SwiGLU whose gradient of the gate lacks the factor 1 + z * (1 - s)'s second term."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return dy * up * gate.sigmoid(), dy * F.silu(gate)


def test_equal_curves_match() -> None:
    reference = curve()
    assert demo.match(reference, reference) == demo.Match(early=0.0, late=0.0, step=1)
    demo.learned(reference)


@pytest.mark.parametrize(
    "wrong",
    [{"eps": 1e-3}, {"activation": gelu_times}, {"activation": WrongBackward.apply}],
    ids=["a larger eps in RMSNorm", "another activation", "a term missing from a gradient"],
)
def test_a_kernel_that_is_slightly_wrong_is_found_out(wrong: dict[str, Any]) -> None:
    with pytest.raises(demo.DemoError, match=r"^a loss of the first 20 steps differs by \d"):
        demo.match(curve(**wrong), curve())


def test_what_is_said_of_curves_that_do_not_match() -> None:
    flat = [3.0] * 100
    for losses, said in (
        (flat[:99], "99 losses against 100 of the reference"),
        ([*flat[:50], float("nan"), *flat[51:]], "the loss of step 51 is nan, the reference's 3.0"),
        ([3.5, *flat[1:]], f"a loss of the first 20 steps differs by 5.0e-01; expected at most {demo.EARLY:g}"),
        ([*flat[:70], 4.0, *flat[71:]], f"the loss of step 71 differs by 1.0e+00; expected at most {demo.LATE:g}"),
    ):
        with pytest.raises(demo.DemoError) as caught:
            demo.match(losses, flat)
        assert str(caught.value) == said


def test_a_model_that_learns_nothing_is_found_out() -> None:
    with pytest.raises(demo.DemoError) as caught:
        demo.learned([3.0] * 100)
    assert str(caught.value) == "the mean loss went from 3.000 to 3.000; expected less than 0.8 of it"


def row(kernel: str, direction: str, reason: str = "", op: str = "aten::x") -> dict[str, Any]:
    return {
        "op": op,
        "kernel": kernel,
        "direction": direction,
        "calls": 1,
        "device": "emulated",
        "config": "",
        "reason": reason,
    }


def test_a_kernel_that_did_not_run_is_found_out() -> None:
    ran = [row("a", "forward"), row("a_backward", "backward"), row("b", "forward", op="my::b")]
    demo.check_kernels(ran, {"A": ("a",)})
    refused = row("", "backward", "dropout", op="aten::y")
    never = [{**row("b", "backward", op="my::b_backward"), "calls": 0}, refused]
    with pytest.raises(demo.DemoError) as caught:
        demo.check_kernels(ran + never, {"A": ("a",), "B": ("my::b",)})
    assert str(caught.value) == ("no kernel of tpukern's ran for B, backward. PyTorch's own ran for\n  aten::y: dropout")
    with pytest.raises(demo.DemoError, match=r"^no kernel of tpukern's ran for A, forward\.$"):
        demo.check_kernels([], {"A": ("a",)})


def test_the_demo_ends_with_what_went_wrong(tmp_path: Path) -> None:
    done = run(sys.executable, ROOT / "tools" / "demo.py", "--steps", "1", "--folder", tmp_path / "kept", cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"\ndemo: the mean loss went from (\d\.\d+) to \1; expected less than 0\.8 of it\n$", done.stderr)
    assert "$ python examples/tiny_llama.py --device cpu --steps 1 --save " in done.stdout
