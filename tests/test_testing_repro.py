"""Failures that can be shown without the test machinery, and that are kept."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tpukern import kernels
from tpukern.dsl import Config, Kernel
from tpukern.dsl.frozen import FrozenMapping
from tpukern.testing import parity, repro
from tpukern.testing.findings import Finding
from tpukern.testing.properties import Session
from tpukern.testing.strategies import Case, Point

MINE = """
import jax.numpy as jnp
from tpukern.dsl import F32, Block, Dim, In, Out, Ref, kernel

def reference(x, *, scale):
    return x * scale

@kernel(reference=reference, tolerance=2)
def wrong(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, scale: float = 2.0, r: Dim = Block(8, 16)) -> None:
    v = x[...].astype(F32) * scale
    y[...] = jnp.where(r.positions(v.shape, 0) == 17, v + 1, v).astype(y.dtype)

@wrong.backward
def wrong_backward(dy, scale):
    return {"dx": dy * scale * 1.5}

@kernel(reference=lambda x: x.exp(), tolerance=2)
def exponential(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 16)) -> None:
    y[...] = jnp.exp(x[...].astype(F32)).astype(y.dtype)
"""


@pytest.fixture
def mine(tmp_path: Path) -> ModuleType:
    path = tmp_path / "own_kernels.py"
    path.write_text(MINE)
    spec = importlib.util.spec_from_file_location("own_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_kernels"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["own_kernels"]


def shown(script: str, folder: Path) -> str:
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + script
    return done.stdout


def finding(kernel: Kernel, **options: object) -> Finding:
    return parity(kernel, properties=["parity"], examples=0, shapes=3, **options).findings[0]  # type: ignore[arg-type]


def test_a_script_of_an_output_and_of_a_gradient(mine: ModuleType, tmp_path: Path) -> None:
    forward = finding(mine.wrong, directions=["forward"])
    assert "tpukern.testing" not in forward.script
    assert len(forward.script.splitlines()) <= 12
    out = shown(forward.script, tmp_path)
    assert abs(float(out.split("largest difference ")[1]) - 1.0) < 1e-2
    backward = finding(mine.wrong, directions=["backward"])
    assert (backward.output, backward.direction) == ("dx", "backward")
    assert "tpukern.testing" not in backward.script
    assert float(shown(backward.script, tmp_path).split("largest difference ")[1]) > 0.1


def test_a_script_of_what_only_the_chips_arithmetic_shows(mine: ModuleType, tmp_path: Path) -> None:
    found = finding(mine.exponential)
    assert "on_tpu" in found.script
    assert "# it shows in the chip's arithmetic only" in found.script
    assert float(shown(found.script, tmp_path).split("largest difference ")[1]) > 0


def test_a_kernel_of_a_package_is_imported_from_it() -> None:
    session = Session(kernels.swiglu)
    case = Case(
        point=Point(dtype="float32", sizes=FrozenMapping({"m": (1,), "f": 1})), kinds=FrozenMapping({"up": "nan"}), seed=3
    )
    script = repro.script(session, Finding(property="parity", direction="forward", what="", case=case, output="y"))
    assert "from tpukern.kernels import swiglu as kernel" in script or "from tpukern.kernels.swiglu import swiglu" in script
    assert 'up=jax.numpy.asarray([[np.nan]], "float32")' in script
    assert repro.script(session, Finding(property="semantics", direction="forward", what="", case=case)) == ""


CASE = Case(
    point=Point(
        dtype="bfloat16",
        sizes=FrozenMapping({"b": (2, 1), "hk": 1, "g": 2, "i": 5, "d": 8, "j": 3, "e": 8}),
        statics=FrozenMapping({"scale": None, "causal": True}),
        forward=Config({"block_i": 128}),
        backward=Config({"flash_attention_dq.block_i": 128}),
    ),
    kinds=FrozenMapping({"q": "huge"}),
    seed=12,
)


def test_cases_are_written_down_whole() -> None:
    assert repro.from_json(repro.to_json(CASE)) == CASE


def kept_finding(case: Case) -> Finding:
    return Finding(property="parity", direction="forward", what="", case=case, output="o")


def test_the_store_keeps_the_newest_first_and_each_once(tmp_path: Path) -> None:
    k, store = kernels.flash_attention, tmp_path / "a" / "b"
    assert repro.kept(store, k) == []
    other = Case(point=CASE.point, seed=13)
    for case in (CASE, other, CASE):
        repro.keep(store, k, kept_finding(case))
    assert repro.kept(store, k) == [CASE, other]
    for seed in range(60):
        repro.keep(store, k, kept_finding(Case(point=CASE.point, seed=seed)))
    assert len(repro.kept(store, k)) == 50
    assert [p.name for p in store.iterdir()] == ["flash_attention.json"]


def test_a_damaged_store_and_a_changed_kernel(tmp_path: Path) -> None:
    k = kernels.flash_attention
    for text in ("{", "[]", '{"cases": 3}', '{"cases": [{"dtype": "float32"}]}'):
        (tmp_path / "flash_attention.json").write_text(text)
        assert repro.kept(tmp_path, k) == []
    repro.keep(tmp_path, k, kept_finding(CASE))
    assert repro.kept(tmp_path, k) == [CASE]
    (tmp_path / "swiglu.json").write_text((tmp_path / "flash_attention.json").read_text())
    assert repro.kept(tmp_path, kernels.swiglu) == []


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    repro.keep(tmp_path / "file" / "store", kernels.flash_attention, kept_finding(CASE))
    assert (tmp_path / "file").read_text() == ""
