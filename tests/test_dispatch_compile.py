"""Kernels and overrides in graphs of torch.compile: whole graphs, training, and caches of other processes."""

import concurrent.futures
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

import tpukern
from tpukern import explanation
from tpukern.dsl import F32, Block, Dim, In, Out, Ref, kernel
from tpukern.kernels import rms_norm
from tpukern.registry import REGISTRY

pytestmark = [pytest.mark.filterwarnings("ignore:<TorchTpu/"), pytest.mark.filterwarnings("ignore:The .grad attribute")]


@kernel(op="dispatch_compile::gelu_gate")
def gelu_gate(
    x: Ref = In("*m f"),
    g: Ref = In("*m f"),
    y: Ref = Out("*m f"),
    t: Ref = Out("*m f", "float32", saved=True),
    *,
    scale: float = 1.0,
    m: Dim = Block(8, 16, default=8),
) -> None:
    t[...] = jax.nn.sigmoid(scale * g[...].astype(F32))
    y[...] = (x[...].astype(F32) * t[...]).astype(y.dtype)


@gelu_gate.backward
def gelu_gate_backward(x, t, dy, scale):  # type: ignore[no-untyped-def]
    d = dy.astype(F32)
    return {"dx": d * t, "dg": d * x.astype(F32) * scale * t * (1 - t)}


@pytest.fixture(autouse=True)
def _clean(tpu: str) -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    tpukern.disable()
    explanation.reset()
    yield
    tpukern.disable()
    torch._dynamo.reset()


class Model(torch.nn.Module):
    """Calls a kernel by itself in its forward pass, and ATen's RMSNorm and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.ones(32))
        self.qkv = torch.nn.Linear(32, 96, bias=False)
        self.up = torch.nn.Linear(32, 64, bias=False)
        self.gate = torch.nn.Linear(32, 64, bias=False)
        self.down = torch.nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.rms_norm(x, (32,), self.norm, 1e-5)
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = F.rms_norm(x, (32,), self.norm, 1e-5)
        return x + self.down(gelu_gate(self.up(h), self.gate(h), scale=1.5))


def train(model: Model, step: Callable[[torch.Tensor], torch.Tensor], device: str) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        x = torch.randn(2, 12, 32, generator=generator).to(device)
        optimizer.zero_grad()
        loss = (step(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(*, compiled: bool, device: str) -> list[float]:
    torch.manual_seed(0)
    model = Model().to(device)
    return train(model, torch.compile(model, fullgraph=True) if compiled else model, device)


def test_training_in_one_graph_matches_eager_and_the_cpu() -> None:
    reference = trained(compiled=False, device="cpu")
    assert reference[-1] < reference[0]
    tpukern.enable(opt_in=["mm"])
    assert trained(compiled=False, device="tpu") == pytest.approx(reference, rel=1e-4)
    explanation.reset()
    assert trained(compiled=True, device="tpu") == pytest.approx(reference, rel=1e-4)
    ran = {(row.kernel, row.direction) for row in explanation.explain().rows if row.kernel}
    for name in ("rms_norm", "flash_attention", "gelu_gate"):
        assert {(name, "forward"), (f"{name}_backward", "backward")} <= ran
    assert ("matmul", "forward") in ran


def test_a_kernel_alone_is_in_the_graph_with_keywords() -> None:
    tpukern.enable()
    x, g = (torch.randn(5, 7, 24).to("tpu") for _ in range(2))
    compiled = torch.compile(lambda x, g: gelu_gate(x, g, scale=2.0, block_m=16) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(x, g).cpu(), (x.cpu() * torch.sigmoid(2 * g.cpu())) + 1)
    (row,) = [row for row in explanation.explain().rows if row.op == "dispatch_compile::gelu_gate"]
    assert row.config == "block_m=16"


def test_saved_outputs_are_no_part_of_the_result_in_a_graph() -> None:
    tpukern.enable()
    x, w = torch.randn(4, 32).to("tpu").requires_grad_(), torch.randn(32).to("tpu").requires_grad_()
    y = torch.compile(lambda x, w: rms_norm(x, w, eps=1e-5), fullgraph=True)(x, w)
    assert isinstance(y, torch.Tensor)
    got = torch.autograd.grad(y.square().sum(), (x, w))
    want = torch.autograd.grad(rms_norm(x, w, eps=1e-5).square().sum(), (x, w))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu())


def test_a_graph_keeps_its_kernels_until_dynamo_is_reset() -> None:
    tpukern.enable(only=["rms_norm"])
    x, w = torch.randn(4, 32).to("tpu"), torch.ones(32).to("tpu")
    function = torch.compile(lambda x, w: F.rms_norm(x, (32,), w, 1e-5), fullgraph=True)
    function(x, w)
    tpukern.disable()
    explanation.reset()
    function(x, w)
    assert explanation.explain().rows == ()
    torch._dynamo.reset()
    torch.testing.assert_close(function(x, w).cpu(), F.rms_norm(x.cpu(), (32,), w.cpu(), 1e-5))
    assert explanation.explain().rows == ()


def test_a_wrong_shape_in_a_graph_is_an_error_with_our_words() -> None:
    tpukern.enable()
    x, g = torch.randn(4, 32).to("tpu"), torch.randn(4, 16).to("tpu")
    with pytest.raises(RuntimeError) as caught:
        torch.compile(lambda x, g: gelu_gate(x, g), fullgraph=True)(x, g)
    words = 'gelu_gate[signature]: dim \'f\' is 16 on g "*m f" but 32 on x "*m f"; expected one size.'
    assert f"SignatureError({words!r}" in str(caught.value)  # inside of what Dynamo says


PROGRAM = """
import sys
import tpukern
tpukern.enable(only=["mine"])
import torch
import jax.numpy as jnp
from tpukern.dsl import Block, Dim, In, Out, Override, Ref, kernel

def impl(self, other):
    return mine.launch(self, other)

@kernel(op="dispatch_program::mine", overrides=[Override("aten::maximum", impl=impl)])
def mine(x: Ref = In("m n"), y: Ref = In("m n"), z: Ref = Out("m n"), *, m: Dim = Block(8)) -> None:
    z[...] = jnp.maximum(x[...], y[...]) + {added}

tpukern.enable(only=["mine"])
x = torch.full((8, 8), 3.0, device="tpu")
y = torch.full((8, 8), 4.0, device="tpu")
torch._dynamo.utils.counters.clear()
print(torch.compile(lambda x, y: torch.maximum(x, y), fullgraph=True)(x, y).max().item(), end=" ")
print(torch.compile(lambda x, y: mine(x, y) * 10, fullgraph=True)(x, y).max().item(), end=" ")
found = torch._dynamo.utils.counters["aot_autograd"]
print(found["autograd_cache_hit"], found["autograd_cache_miss"])
"""


def test_another_process_takes_no_graph_of_a_kernel_that_has_changed(tmp_path: Path) -> None:
    def run(added: str) -> list[str]:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(PROGRAM.replace("{added}", added)).replace('tpukern.enable(only=["mine"])\n', "", 1))
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONWARNINGS": "ignore"}
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert run("1") == ["5.0", "50.0", "0", "2"]
    assert run("1") == ["5.0", "50.0", "2", "0"]  # the cache works
    assert run("2") == ["6.0", "60.0", "0", "2"]  # and is not believed


@pytest.fixture
def _own_tag() -> Iterator[None]:
    before = REGISTRY.user_tag
    torch.compiler.config.cache_key_tag = "mine"
    yield
    torch.compiler.config.cache_key_tag = before


@pytest.mark.usefixtures("_own_tag")
def test_the_users_cache_tag_is_kept() -> None:
    tpukern.enable(only=["rms_norm"])
    enabled = torch.compiler.config.cache_key_tag
    tpukern.enable()
    everything = torch.compiler.config.cache_key_tag
    tpukern.disable()
    disabled = torch.compiler.config.cache_key_tag
    assert all(tag.startswith("minetpukern-") for tag in (enabled, everything, disabled))
    assert len({enabled, everything, disabled}) == 3
    tpukern.enable(only=["rms_norm"])
    assert torch.compiler.config.cache_key_tag == enabled


def test_every_thread_has_the_tag() -> None:
    """Else a graph compiled in a thread is taken from PyTorch's cache on disk though its kernels have changed."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for switch in (tpukern.enable, tpukern.disable, tpukern.enable):
            switch()
            here = torch.compiler.config.cache_key_tag
            assert "tpukern-" in here
            assert pool.submit(lambda: torch.compiler.config.cache_key_tag).result() == here


def test_a_kernel_declared_after_enable_changes_the_tag() -> None:
    tpukern.enable()
    before = torch.compiler.config.cache_key_tag

    @kernel(op="dispatch_compile::late")
    def late(x: Ref = In("m n"), y: Ref = Out("m n"), *, m: Dim = Block(8)) -> None:
        y[...] = jnp.negative(x[...])

    assert torch.compiler.config.cache_key_tag != before
