"""When kernels are registered with torch, and what is loaded for it: each in a process of its own."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

DECLARE = """
from tpukern.dsl import Block, Dim, In, Out, Override, Ref, kernel

@kernel(op="registry::plus_one")
def plus_one(x: Ref = In("m n"), y: Ref = Out("m n"), *, m: Dim = Block(8)) -> None:
    y[...] = x[...] + 1

@plus_one.backward
def plus_one_backward(dy):
    return {"dx": dy * 1}
"""


def run(tmp_path: Path, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"  # a file: kernels are read from their source
    script.write_text("import json, sys\n" + textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done


def loaded(tmp_path: Path, program: str, *names: str) -> list[str]:
    done = run(tmp_path, f"{program}\nprint(json.dumps([name for name in {names!r} if name in sys.modules]))")
    return list(json.loads(done.stdout))


def test_the_registry_and_dispatch_load_nothing_heavy(tmp_path: Path) -> None:
    heavy = ("torch", "jax", "numpy", "torch_tpu", "libtpu")
    assert loaded(tmp_path, "import tpukern.registry, tpukern.dispatch, tpukern.explanation", *heavy) == []
    assert loaded(tmp_path, "import tpukern; tpukern.disable(); tpukern.explain()", *heavy) == []


def test_declaring_a_kernel_loads_no_torch(tmp_path: Path) -> None:
    assert loaded(tmp_path, DECLARE, "torch", "torch_tpu", "libtpu") == []


def test_a_kernel_runs_on_cpu_tensors_without_a_device(tmp_path: Path) -> None:
    program = """
    import torch
    x = torch.zeros(3, 4, requires_grad=True)
    plus_one(x).sum().backward()
    print(x.grad.sum().item(), torch.ops.registry.plus_one(x).sum().item(), "torch_tpu" in sys.modules)
    """
    done = run(tmp_path, DECLARE + textwrap.dedent(program), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.split() == ["12.0", "12.0", "False"]


@pytest.mark.usefixtures("tpu")
@pytest.mark.parametrize("order", ["declare, torch, enable", "torch, declare, enable", "enable, declare"])
def test_enable_and_declare_in_any_order(tmp_path: Path, order: str) -> None:
    steps = {
        "declare": DECLARE,
        "torch": "import torch",
        "enable": "import tpukern\nkind = tpukern.enable()\nassert kind == tpukern.enable() == tpukern.device_kind()",
    }
    use = """
    import torch
    x = torch.zeros(3, 4).to("tpu").requires_grad_()
    torch.compile(lambda x: plus_one(x) * 2, fullgraph=True)(x).sum().backward()
    print(x.grad.sum().item(), torch.ops.registry.plus_one(x).sum().item(), kind)
    """
    done = run(tmp_path, "\n".join(steps[step] for step in order.split(", ")) + "\n" + textwrap.dedent(use))
    assert done.stdout.split()[:2] == ["24.0", "12.0"]
    said = [line for line in done.stderr.splitlines() if line.startswith("tpukern: ")]
    kind = done.stdout.split()[2]
    assert len(said) == 1  # once, though enabled twice
    assert said[0].startswith(f"tpukern: the tpu device is {'emulated' if kind == 'emulated' else 'a real TPU'}")


@pytest.mark.usefixtures("tpu")
def test_a_kernel_with_an_override_may_be_declared_again(tmp_path: Path) -> None:
    program = """
    import tpukern
    from tpukern.dsl import Block, Dim, In, Out, Override, Ref, kernel

    def declare(added, op):
        def impl(self, other):
            return larger.launch(self, other)

        @kernel(op=op, overrides=[Override("aten::maximum", impl=impl)])
        def larger(x: Ref = In("m n"), y: Ref = In("m n"), z: Ref = Out("m n"), *, m: Dim = Block(8)) -> None:
            z[...] = x[...] + y[...] + added

    for op in (None, "registry::larger"):
        for added in (1, 2):
            declare(added, op)
            tpukern.enable(only=["larger"])
            import torch
            x = torch.ones(2, 2, device="tpu")
            print(torch.maximum(x, x).max().item())
        tpukern.disable()
        from tpukern.dsl import declared
        declared._KERNELS.clear()
    """
    assert run(tmp_path, program).stdout.split() == ["3.0", "4.0", "3.0", "4.0"]
