"""``tpukern verify``."""

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

SCRIPT = str(Path(sysconfig.get_path("scripts")) / "tpukern")

MINE = """
from tpukern.dsl import F32, Block, Dim, In, Out, Ref, kernel

def reference(x):
    return 2 * x

@kernel(reference=reference, tolerance=1)
def double(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 16)) -> None:
    y[...] = x[...] * 2

@kernel(reference=reference, tolerance=1)
def triple(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 16)) -> None:
    y[...] = x[...] * 3

@kernel(dtypes=("float32",))
def bare(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 16)) -> None:
    y[...] = x[...] * 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def tpukern(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TPUKERN_CACHE_DIR": str(folder / "cache")}
    return subprocess.run([SCRIPT, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_a_right_kernel(folder: Path) -> None:
    done = tpukern(folder, "verify", "mine.py:double", "--examples", "5", "--seed", "3", "--target", "v5e", "--json")
    assert done.returncode == 0, done.stderr
    (verdict,) = json.loads(done.stdout)
    assert (verdict["kernel"], verdict["ok"], verdict["examples"], verdict["seed"]) == ("double", True, 5, 3)
    asked = {p["property"]: p["cases"] for p in verdict["properties"]}
    assert asked["compiles"] == 6  # in either type the least size, a little over a block, and several
    assert asked["parity"] > 5
    assert [(w["output"], w["dtype"]) for w in verdict["worst"]] == [("y", "bfloat16"), ("y", "float32")]
    assert not (folder / ".tpukern").exists()


def test_a_wrong_kernel_and_the_memory_of_it(folder: Path) -> None:
    words = ("verify", "mine.py:triple", "--examples", "5", "--property", "parity")
    done = tpukern(folder, *words)
    assert done.returncode == 1, done.stderr
    assert "found: parity (forward): y is off by " in done.stdout
    assert "from mine import triple as kernel" in done.stdout
    assert "triple is wrong: 5 examples, seed 0, " in done.stderr
    assert (folder / ".tpukern" / "regressions" / "triple.json").is_file()


def test_a_kernel_without_reference_is_neither_right_nor_wrong(folder: Path) -> None:
    words = ("verify", "mine.py:bare", "--examples", "1", "--property", "parity", "--property", "deterministic")
    done = tpukern(folder, *words)
    assert done.returncode == 1
    first, last = done.stderr.strip().splitlines()[-2:]
    assert first == (
        "bare: it has no reference, so whether its results are right cannot be judged. "
        "Give the decorator reference=: the same in plain torch."
    )
    assert last.startswith("bare is not judged: 1 examples, seed 0, ")
    done = tpukern(folder, *words, "--json")
    assert done.returncode == 1
    (verdict,) = json.loads(done.stdout)
    assert (verdict["ok"], verdict["unjudged"]) == (False, "it has no reference")
    assert [(p["property"], p["cases"], p["skipped"]) for p in verdict["properties"]] == [
        ("parity", 0, "it has no reference"),
        ("deterministic", 1, None),
    ]


def test_words_that_mean_nothing(folder: Path) -> None:
    done = tpukern(folder, "verify", "mine.py:double", "--property", "sematics", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"].endswith("Did you mean 'semantics'.")
    done = tpukern(folder, "verify", "mine.py:double", "--examples", "-1")
    assert done.returncode == 2
    assert "tpukern verify: invalid value for '--examples'" in done.stderr
