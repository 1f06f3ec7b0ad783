"""``tpukern mutate``."""

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

SCRIPT = str(Path(sysconfig.get_path("scripts")) / "tpukern")

MINE = """
from tpukern.dsl import Block, Dim, In, Out, Ref, kernel

def reference(x):
    return 2 * x

@kernel(reference=reference, tolerance=1, dtypes=("float32",))
def double(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 16)) -> None:
    y[...] = x[...] * 2.0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def tpukern(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TPUKERN_CACHE_DIR": str(folder / "cache")}
    return subprocess.run([SCRIPT, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_mutants_of_a_kernel(folder: Path) -> None:
    done = tpukern(folder, "mutate", "mine.py:double", "--examples", "2", "--limit", "4", "--seed", "3", "--json")
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)
    assert (report["kernel"], report["mutants"], report["survived"], report["rate"]) == ("double", 4, 0, 1.0)
    assert (report["seed"], report["examples"]) == (3, 2)
    kinds = {o["kind"]: o["state"] for o in report["outcomes"]}
    assert kinds.keys() == {"dropped write", "dropped last step", "off-by-one block", "wrong scale"}
    assert kinds["dropped write"] == kinds["off-by-one block"] == kinds["dropped last step"] == "caught"
    assert "double: wrong scale in double, line 9: " in done.stderr
    assert (folder / "mine.py").read_text() == MINE


def test_a_table_for_people(folder: Path) -> None:
    done = tpukern(folder, "mutate", "mine.py:double", "--examples", "2", "--limit", "1", "--seed", "8")
    assert done.returncode == 0, done.stderr
    assert "seconds" in done.stdout
    assert "double: 1 mutants of 1 kinds: 1 caught, 0 refused, 0 equivalent, 0 survived; 100.0% of those" in done.stderr


def test_words_that_mean_nothing(folder: Path) -> None:
    done = tpukern(folder, "mutate", "mine.py:duoble", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"].endswith("Did you mean 'double'.")
    done = tpukern(folder, "mutate", "mine.py:double", "--limit", "0")
    assert done.returncode == 2
    assert "tpukern mutate: invalid value for '--limit'" in done.stderr
