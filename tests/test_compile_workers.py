"""Worker processes: whatever happens to one, its job alone fails, and nothing is left behind."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import types

import jax
import jax.numpy as jnp
import pytest

from tpukern import compiling, environment, worker_pool
from tpukern.compiling import Job
from tpukern.errors import CompileError
from tpukern.targets import TARGETS

pytest.importorskip("libtpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKERN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def temp_folder(tmp_path, monkeypatch):
    """Where workers put their temporary folders."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def job(name: str, number: float = 1.0) -> Job:
    """A program that compiles in no time."""
    owner = types.SimpleNamespace(name=name, source_digest=lambda: str(number))
    spec = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    bound = types.SimpleNamespace(kernel=owner, function=lambda x: x + number, specs=(spec,), target=None, config={})
    return Job(bound=bound, target=TARGETS["v5e"])


NAMES = ("first", "victim", "last")


def compile_named(monkeypatch, befall, **keywords):
    """Compiles three jobs in one worker at a time; ``befall(worker)`` is called when the victim's would reach a worker."""
    send = worker_pool._Worker.send
    jobs = [job(name, float(n)) for n, name in enumerate(NAMES)]

    def watched(worker, task, timeout_s):
        if NAMES[task.tag] != "victim":
            return send(worker, task, timeout_s)
        worker.task, worker.deadline = task, time.monotonic() + timeout_s  # sent, but it cannot have been answered
        befall(worker)

    with monkeypatch.context() as patch:
        patch.setattr(worker_pool._Worker, "send", watched)
        results = compiling.compile_many(jobs, workers=1, **keywords)
    assert [r.kernel for r in results] == list(NAMES)
    first, victim, last = results
    assert first.ok, first.error
    assert last.ok, last.error
    assert not victim.ok
    assert (victim.vmem_bytes, victim.code_bytes, victim.digest is None) == (None, None, False)
    return victim


def test_a_killed_worker_fails_its_job_alone(monkeypatch, temp_folder):
    victim = compile_named(monkeypatch, lambda worker: os.kill(worker.process.pid, signal.SIGKILL))
    assert victim.error == "victim[compile] on v5e: the compile worker ended with signal SIGKILL."
    assert list(temp_folder.iterdir()) == []
    again = compiling.compile(job("victim", 1.0).bound, "v5e")
    assert (again.ok, again.cached) == (True, False)  # such a failure is not kept


def test_a_worker_that_aborts_leaves_its_last_words(monkeypatch):
    victim = compile_named(monkeypatch, lambda worker: os.kill(worker.process.pid, signal.SIGABRT))
    before = "victim[compile] on v5e: the compile worker ended with signal SIGABRT; its last words: "
    assert victim.error.startswith(before + "Fatal Python error: Aborted")
    assert len(victim.error) < 2000


def test_a_compile_that_takes_too_long_is_killed(monkeypatch):
    def hurry(worker):
        worker.deadline = time.monotonic() + 0.2

    victim = compile_named(monkeypatch, hurry, timeout_s=77)
    assert victim.error == "victim[compile] on v5e: no result after 77 s, and killed."


def test_a_worker_that_stops_reading_does_not_stop_us(monkeypatch):
    """The module is larger than a pipe; the worker is stopped before it reads it."""

    def stop(worker):
        os.kill(worker.process.pid, signal.SIGSTOP)
        worker.unsent, worker.deadline = b"x" * (1 << 22), time.monotonic() + 0.5

    victim = compile_named(monkeypatch, stop, timeout_s=77)
    assert victim.error == "victim[compile] on v5e: no result after 77 s, and killed."


def test_one_dead_worker_of_two(monkeypatch):
    killed = []
    send = worker_pool._Worker.send

    def watched(worker, task, timeout_s):
        send(worker, task, timeout_s)
        if not killed:
            killed.append(task.tag)
            os.kill(worker.process.pid, signal.SIGKILL)
            worker.process.wait()

    monkeypatch.setattr(worker_pool._Worker, "send", watched)
    results = compiling.compile_many([job(f"job{n}", float(n)) for n in range(6)], workers=2)
    assert [n for n, r in enumerate(results) if not r.ok] == killed


def test_a_worker_that_does_not_start(monkeypatch, temp_folder):
    monkeypatch.setattr(worker_pool, "_START_S", 0.01)
    with pytest.raises(CompileError) as caught:
        compiling.compile(job("demo").bound, "v5e")
    assert str(caught.value) == "worker[compile]: not started after 0.01 s, and killed. Run 'tpukern doctor'."
    assert list(temp_folder.iterdir()) == []


def test_a_python_that_cannot_be_run(monkeypatch, temp_folder):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(CompileError) as caught:
        compiling.compile(job("demo").bound, "v5e")
    assert str(caught.value) == (
        "worker[compile]: cannot start /no/such/python: [Errno 2] No such file or directory: '/no/such/python'."
        " Check memory and disk."
    )
    assert list(temp_folder.iterdir()) == []


def test_no_temporary_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(CompileError) as caught:
        compiling.compile(job("demo").bound, "v5e")
    assert str(caught.value) == (
        f"worker[compile]: no temporary folder in {tmp_path / 'missing'}: No such file or directory."
        " Free space there, or set TMPDIR."
    )


def test_libtpu_is_not_installed(monkeypatch):
    import importlib.metadata

    real = importlib.metadata.version

    def version(name):
        if name == "libtpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(CompileError) as caught:
        compiling.compile(job("demo").bound, "v5e")
    assert str(caught.value) == (
        "tpukern[compile]: libtpu, the TPU compiler, is not installed. pip install 'tpukern[compile]'"
    )


def test_libtpu_cannot_be_imported_in_the_worker(monkeypatch, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "libtpu.py").write_text("raise ImportError('no library for this machine')\n")
    monkeypatch.syspath_prepend(str(broken))
    with pytest.raises(CompileError) as caught:
        compiling.compile(job("demo").bound, "v5e")
    assert str(caught.value) == (
        "worker[compile]: libtpu, the TPU compiler, cannot be loaded (ImportError: no library for this machine)."
        " pip install 'tpukern[compile]'"
    )


def test_a_worker_that_crashes_while_it_starts(monkeypatch, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "libtpu.py").write_text("import os, sys\nsys.stderr.write('no such chip')\nsys.stderr.flush()\nos._exit(3)\n")
    monkeypatch.syspath_prepend(str(broken))
    with pytest.raises(CompileError) as caught:
        compiling.compile(job("demo").bound, "v5e")
    assert str(caught.value) == (
        "worker[compile]: the compile worker ended with exit status 3; its last words: no such chip. Run 'tpukern doctor'."
    )


def test_the_current_folder_and_warnings_do_not_reach_the_worker(monkeypatch, tmp_path):
    (tmp_path / "jax.py").write_text("raise SystemExit('the wrong jax')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "jax.py"))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--no_such_flag")
    assert compiling.compile(job("demo").bound, "v5e").ok


def test_a_cache_that_cannot_be_written_does_no_harm(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TPUKERN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="cannot be written: Not a directory; results are not kept") as caught:
        results = compiling.compile_many([job("one", 1.0), job("two", 2.0)])
    assert len(caught) == 1
    assert [r.ok for r in results] == [True, True]


def test_libtpu_writes_no_logs(monkeypatch, temp_folder):
    seen, began = [], time.time()
    end = worker_pool._Worker.end

    def watched(worker):
        seen.append([str(path) for path in worker.temp_folder.rglob("*")])
        logs = pathlib.Path("/tmp/tpu_logs")  # of an earlier process of that number there may be some
        mine = logs.glob(f"*.{worker.process.pid}") if logs.exists() else ()
        seen.append([str(path) for path in mine if path.stat().st_mtime >= began - 1])
        return end(worker)

    monkeypatch.setattr(worker_pool._Worker, "end", watched)
    results = compiling.compile_many([job("one", 1.0), job("two", 2.0)], workers=1)
    assert all(r.ok for r in results)
    assert seen == [[], []]
    assert list(temp_folder.iterdir()) == []


# --- whole processes -------------------------------------------------------------------------------------------------

PROLOGUE = """
import json, os, sys, types
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from tpukern import compiling, worker_pool
from tpukern.targets import TARGETS
print("main runs", flush=True)

def program(count):
    def function(x):
        def body(x_ref, y_ref):
            v = x_ref[...]
            for i in range(count):
                v = jnp.dot(v, v, preferred_element_type=jnp.float32).astype(v.dtype) + i
            y_ref[...] = v
        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
    kernel = types.SimpleNamespace(name="chain", source_digest=lambda: str(count))
    spec = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    return types.SimpleNamespace(kernel=kernel, function=function, specs=(spec,), target=None, config={})
"""

LONG = """
send = worker_pool._Worker.send
def watched(worker, task, timeout_s):
    send(worker, task, timeout_s)
    print(json.dumps([worker.process.pid, str(worker.temp_folder.parent)]), flush=True)
worker_pool._Worker.send = watched
compiling.compile_many([compiling.Job(bound=program(n), target=TARGETS["v5e"]) for n in (256, 257)], workers=2)
print("finished", flush=True)
"""


def script(tmp_path: pathlib.Path, text: str) -> subprocess.Popen[str]:
    path = tmp_path / "user_script.py"  # without a __main__ guard, as users write them
    path.write_text(PROLOGUE + textwrap.dedent(text))
    env = environment.worker_environment(tmp_path) | {"TPUKERN_CACHE_DIR": str(tmp_path / "cache")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, str(path)], env=env, cwd=tmp_path, text=True, **pipes)


def alive(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone_within(seconds: float, pids: list[int]) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_a_process_that_is_ended_in_the_middle_leaves_no_worker(tmp_path, signal_):
    process = script(tmp_path, LONG)
    assert process.stdout.readline() == "main runs\n"
    told = [json.loads(process.stdout.readline()) for _ in range(2)]
    pids, folders = [pid for pid, _ in told], {pathlib.Path(folder) for _, folder in told}
    time.sleep(1)
    assert all(map(alive, pids))  # both are compiling: a chain of 256 takes 10 s and more
    process.send_signal(signal_)
    out, err = process.communicate(timeout=60)
    assert "finished" not in out
    assert gone_within(30, pids)
    assert [folder for folder in folders if folder.exists()] == []
    if signal_ == signal.SIGINT:
        assert process.returncode in (1, -signal.SIGINT)
        assert "KeyboardInterrupt" in err


def test_the_users_main_runs_once_and_no_libtpu_is_loaded_in_it(tmp_path):
    text = """
    result = compiling.compile(program(1), "v5e")
    print(result.ok, result.cached, "libtpu" in open("/proc/self/maps").read(), jax.default_backend(), flush=True)
    """
    out, err = script(tmp_path, text).communicate(timeout=300)
    assert out.splitlines() == ["main runs", "True False False cpu"], err


def test_two_processes_that_compile_the_same_thing(tmp_path):
    text = """
    results = compiling.compile_many([compiling.Job(bound=program(n), target=TARGETS["v5e"]) for n in (1, 2, 3)])
    print(json.dumps([[r.ok, r.code_bytes, r.digest] for r in results]), flush=True)
    """
    processes = [script(tmp_path, text) for _ in range(2)]
    said = [process.communicate(timeout=300)[0].splitlines()[-1] for process in processes]
    assert said[0] == said[1]
    assert all(ok for ok, _, _ in json.loads(said[0]))
    assert len(list((tmp_path / "cache").glob("compiled/*/*"))) == 3
    warm = """
    results = compiling.compile_many([compiling.Job(bound=program(n), target=TARGETS["v5e"]) for n in (1, 2, 3)])
    print([r.cached for r in results], flush=True)
    """
    assert script(tmp_path, warm).communicate(timeout=300)[0].splitlines()[-1] == "[True, True, True]"
