"""``tpukern compile`` and ``tpukern cache``, with the real compiler."""

import json
import os
import pty
import signal
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPT = str(Path(sysconfig.get_path("scripts")) / "tpukern")

USER = """
print("imported")
from tpukern.dsl import Acc, Block, Dim, In, Out, Ref, Workload, kernel

SMALL = (Workload("small", r=16, d=128), Workload("other", dtype="float32", r=32, d=256))

@kernel(workloads=SMALL)
def double(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 16, 64, default=16)) -> None:
    y[...] = x[...] * 2

@double.backward
@kernel
def double_backward(dy: Ref = In("*r d"), dx: Ref = Out("*r d"), *, e: int = 1, r: Dim = Block(8, 16, 32, default=32)) -> None:
    dx[...] = dy[...] * 2

@kernel(workloads=SMALL)
def broken(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 16)) -> None:
    raise ValueError("own words")

@kernel(workloads=(Workload("wide", dtype="float32", r=4096, d=8192),))
def wide(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 16, 4096)) -> None:
    y[:8] = x[:8] * 2  # little code: a refusal takes minutes if the body is unrolled 4096 times
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(USER)
    return tmp_path


def tpukern(folder: Path, *words: str, cache: str = "cache", **options: Any) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TPUKERN_CACHE_DIR": str(folder / cache)}
    return subprocess.run([SCRIPT, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=300, **options)


def test_rows_and_a_warm_second_time(folder: Path) -> None:
    words = ["compile", "mine.py:double", "--target", "v5e,v6e", "--json"]
    done = tpukern(folder, *words)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    points = [(row["direction"], row["workload"], row["dtype"], row["target"]) for row in rows]
    assert points == [
        (direction, workload, dtype, target)
        for direction in ("forward", "backward")
        for workload, dtype in (("small", "bfloat16"), ("other", "float32"))
        for target in ("v5e", "v6e")
    ]
    for row in rows:
        assert set(row) == {
            *("kernel", "direction", "workload", "dtype", "target", "config"),
            *("ok", "seconds", "vmem_bytes", "code_bytes", "digest", "cached", "error"),
        }
        assert (row["kernel"], row["ok"], row["error"], row["cached"]) == ("double", True, None, False)
        assert row["seconds"] > 0
        assert row["code_bytes"] > 0
        assert len(row["digest"]) == 64
    assert rows[0]["config"] == {"block_r": 16}
    assert rows[6]["config"] == {"block_r": 32}
    lines = done.stderr.splitlines()
    assert lines[0] == "imported"
    assert [line.split("]")[0] for line in lines[1:]] == [f"[{n}/8" for n in range(1, 9)]

    again = tpukern(folder, *words)
    assert again.returncode == 0
    assert json.loads(again.stdout) == [row | {"cached": True} for row in rows]
    assert all(line.endswith(": ok, cached") for line in again.stderr.splitlines()[1:])

    info = json.loads(tpukern(folder, "cache", "info", "--json").stdout)
    assert info.pop("bytes") > 0
    assert info == {"path": str(folder / "cache"), "entries": 8, "limit_bytes": 256 * 2**20, "problem": None}
    assert tpukern(folder, "cache", "path").stdout == f"{folder / 'cache'}\n"
    cleared = json.loads(tpukern(folder, "cache", "clear", "--json").stdout)
    assert (cleared["path"], cleared["entries"]) == (str(folder / "cache"), 8)
    assert json.loads(tpukern(folder, "cache", "info", "--json").stdout)["entries"] == 0
    cold = tpukern(folder, *words, "--direction", "forward", "--workload", "small")
    assert [row["cached"] for row in json.loads(cold.stdout)] == [False, False]


def test_the_table(folder: Path) -> None:
    done = tpukern(folder, "compile", "mine.py:double", "--target", "v5e", "--workload", "small", "--workers", "1")
    assert done.returncode == 0
    heading, rule, *rows = done.stdout.splitlines()
    names = [
        "kernel",
        "direction",
        "workload",
        "dtype",
        "target",
        "ok",
        "seconds",
        "VMEM",
        "MiB",
        "code",
        "MiB",
        "cached",
        "digest",
    ]
    assert heading.split() == names
    assert set(rule.strip()) == {"─"}
    assert [row.split()[:6] for row in rows] == [
        ["double", direction, "small", "bfloat16", "v5e", "yes"] for direction in ("forward", "backward")
    ]
    assert done.stderr.splitlines()[-1] == "2 of 2 compile; 0 results from the cache."


def test_shape_dtype_and_config(folder: Path) -> None:
    words = ["--shape", "r=2x48,d=256", "--dtype", "f32", "--config", "block_r=8", "--direction", "forward", "--json"]
    (row,) = json.loads(tpukern(folder, "compile", "mine.py:double", "--target", "v5e", *words).stdout)
    assert (row["workload"], row["dtype"], row["config"], row["ok"]) == ("r=2x48,d=256", "float32", {"block_r": 8}, True)


def test_a_vmem_overflow(folder: Path) -> None:
    words = ["compile", "mine.py:wide", "--config", "block_r=4096", "--json"]
    done = tpukern(folder, *words, "--target", "v5e,v7x")
    assert done.returncode == 1
    rows = json.loads(done.stdout)
    v5e = "wide[compile] on v5e: 256.00 MiB of VMEM needed; expected at most 128.00 MiB. Choose smaller blocks."
    v7x = "wide[compile] on v7x: 256.00 MiB of VMEM needed; expected at most 64.00 MiB. Choose smaller blocks."
    assert [(row["ok"], row["error"], row["vmem_bytes"]) for row in rows] == [(False, v5e, 2**28), (False, v7x, 2**28)]
    table = tpukern(folder, *words[:-1], "--target", "v5e")
    assert table.returncode == 1
    assert f"\nfailed: wide forward wide float32 v5e\n{v5e}\n" in table.stdout
    assert table.stderr.endswith("[1/1] wide wide v5e: FAILED, cached\n0 of 1 compile; 1 results from the cache.\n")


def test_a_body_that_raises_is_a_failed_row(folder: Path) -> None:
    done = tpukern(folder, "compile", "mine.py:broken", "--target", "v5e", "--workload", "small", "--json")
    (row,) = json.loads(done.stdout)
    expected = (
        f"broken[lower] on v5e: ValueError: own words, at {folder / 'mine.py'}:18; expected a body that Pallas can lower."
    )
    assert (done.returncode, row["ok"], row["error"], row["digest"]) == (1, False, expected, None)


def test_no_compiler(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(
        "import importlib.metadata as m\nfind = m.version\n"
        "def version(name):\n    if name == 'libtpu':\n        raise m.PackageNotFoundError(name)\n    return find(name)\n"
        "m.version = version\n"
    )
    env = os.environ | {"TPUKERN_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(folder)}
    words = [SCRIPT, "compile", "mine.py:double", "--target", "v5e"]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    message = "error: tpukern[compile]: libtpu, the TPU compiler, is not installed. pip install 'tpukern[compile]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "imported\n" + message)


def test_a_cache_that_cannot_be_written(folder: Path) -> None:
    (folder / "taken").write_text("a file where the folder should be")
    words = ["compile", "mine.py:double", "--target", "v5e", "--workload", "small", "--direction", "forward", "--json"]
    done = tpukern(folder, *words, cache="taken")
    assert done.returncode == 0
    assert [row["ok"] for row in json.loads(done.stdout)] == [True]
    problem = f"{folder / 'taken'} cannot be written: Not a directory"
    warning = f"warning: tpukern[cache]: {problem}; results are not kept. Mend it, or set TPUKERN_CACHE_DIR."
    assert warning in done.stderr.splitlines()
    info = tpukern(folder, "cache", "info", cache="taken")
    assert (info.returncode, info.stderr) == (1, "")
    assert info.stdout == f"{folder / 'taken'}: 0 results, 0.00 of 256.00 MiB; {problem}.\n"


def test_an_interrupt_leaves_no_worker(folder: Path) -> None:
    env = os.environ | {"TPUKERN_CACHE_DIR": str(folder / "cache"), "TMPDIR": str(folder)}
    command = [SCRIPT, "compile", "mine.py:double", "--target", "all"]
    with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "[1/" not in (line := process.stderr.readline()):
            assert line, "it ended before the first result"
        workers = children(process.pid)
        assert workers
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.endswith("error: interrupted.\n")
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived the command"
        time.sleep(0.05)
    assert list(folder.glob("tpukern-*")) == []


def children(pid: int) -> list[str]:
    return [c for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]


def test_the_bar_on_a_terminal(folder: Path) -> None:
    ours, theirs = pty.openpty()
    env = os.environ | {"TPUKERN_CACHE_DIR": str(folder / "cache"), "TERM": "xterm", "COLUMNS": "100"}
    command = [SCRIPT, "compile", "mine.py:double", "--target", "v5e", "--workload", "small", "--json"]
    with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        while chunk := read(ours):
            seen += chunk
        assert process.stdout is not None
        rows = json.loads(process.stdout.read())
    os.close(ours)
    assert [row["ok"] for row in rows] == [True, True]
    text = seen.decode()
    assert "2/2" in text
    assert "double_backward small v5e" in text
    assert "\x1b[2K" in text, "the bar is erased at the end"


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the terminal's other end is closed
        return b""
