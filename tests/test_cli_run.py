"""``tpukern run``: a script behaves as under python, and is told about afterwards.

All but the last two tests put a counterfeit of ``tpukern.enable`` and ``tpukern.explain`` in place, and so need
neither torch nor a device: their subject is the process around the script.
"""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

COUNTERFEIT = """
import dataclasses, json, sys
import tpukern

@dataclasses.dataclass
class Row:
    op: str
    calls: int

class Explanation:
    rows = (Row("tpukern::fake", 3),)
    left_out = (("aten::mm", "opt-in, not asked for"),)
    def __str__(self):
        return "EXPLAINED"

def enable(**given):
    assert "torch" not in sys.modules, "the device is set up before torch is imported"
    print("enable " + json.dumps(given), file=sys.stderr)
    return "emulated"

tpukern.enable, tpukern.explain = enable, Explanation
from tpukern.cli import main
main()
"""
ENABLED = 'enable {"only": null, "off": null, "opt_in": []}\n'


def tpukern_run(folder: Path, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", COUNTERFEIT, "run", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload]


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=120)


def write(folder: Path, name: str, source: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source))
    return path


SURROUNDINGS = """
    import json, os, sys, pickle, neighbour
    class Here: pass
    print(json.dumps({
        "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "spec": repr(__spec__), "doc": __doc__,
        "package": __package__, "cached": __cached__, "loader": type(__loader__).__name__,
        "main": sys.modules["__main__"].__file__,
        "builtins": type(__builtins__).__name__, "annotations": __annotations__, "globals": sorted(globals()),
        "pickled": pickle.loads(pickle.dumps(Here)) is Here, "neighbour": neighbour.VALUE, "cwd": os.getcwd(),
    }))
"""


@pytest.mark.parametrize("script", ["train.py", "./train.py", "inner/train.py", "link.py", "inner"])
def test_the_script_sees_what_it_sees_under_python(tmp_path: Path, script: str) -> None:
    for folder in (tmp_path, tmp_path / "inner"):
        write(folder, "train.py", '"""Words."""\n' + textwrap.dedent(SURROUNDINGS))
        write(folder, "neighbour.py", f"VALUE = {str(folder)!r}")
    write(tmp_path / "inner", "__main__.py", SURROUNDINGS)
    (tmp_path / "link.py").symlink_to(tmp_path / "inner" / "train.py")
    arguments = ["--json", "-x", "--", "a b", "--only=1"]
    theirs, ours = python(tmp_path, script, *arguments), tpukern_run(tmp_path, script, *arguments)
    assert theirs.returncode == ours.returncode == 0, ours.stderr
    expected, found = json.loads(theirs.stdout), json.loads(ours.stdout)
    if script == "inner":  # python finds a folder's __main__ through a zip-like importer, whose spec is a real one
        for seen in (expected, found):
            seen.update(spec=None, loader=None, cached=None, package=None, file=os.path.abspath(tmp_path / seen["file"]))
            seen["argv"][0], seen["path"], seen["main"] = "inner", os.path.abspath(tmp_path / seen["path"]), None
    assert found == expected
    assert ours.stderr == ENABLED + "EXPLAINED\n"


FAILURES = {
    "raises": "def f():\n    raise ValueError('own words')\nf()\n",
    "raises from": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('second') from e\n",
    "tpukern error": "import tpukern\nraise tpukern.ConfigError('k', 'found')\n",
    "click error": "import click\nraise click.UsageError('theirs')\n",
    "broken pipe": "import errno\nraise OSError(errno.EPIPE, 'pipe')\n",
    "end of file": "raise EOFError\n",
    "syntax": "print('never')\nx = = 1\n",
    "own hook": "import sys\nsys.excepthook = lambda kind, e, trace: print(kind, trace.tb_lineno, file=sys.stderr)\n1 / 0\n",
    "exit": "import sys\nsys.exit(7)\n",
    "exit with words": "raise SystemExit('enough')\n",
    "exit with none": "raise SystemExit\n",
    "exit with true": "raise SystemExit(True)\n",
    "atexit": "import atexit, sys\natexit.register(print, 'last')\nsys.exit(3)\n",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('thread ends'))).start()\n",
    "deprecated": "import warnings\nwarnings.warn('old', DeprecationWarning)\n",
    "hard": "import os\nos._exit(9)\n",
}


@pytest.mark.parametrize("kind", FAILURES)
def test_the_end_of_the_script_is_as_under_python(tmp_path: Path, kind: str) -> None:
    write(tmp_path, "s.py", FAILURES[kind])
    theirs, ours = python(tmp_path, "s.py"), tpukern_run(tmp_path, "s.py")
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout), ours.stderr
    explained = "" if kind == "hard" else "EXPLAINED\n"
    expected = theirs.stderr + explained if kind == "deprecated" else explained + theirs.stderr
    assert ours.stderr == ENABLED + expected


def test_an_interrupt_ends_the_process_by_the_signal(tmp_path: Path) -> None:
    write(tmp_path, "s.py", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(5)\n")
    theirs, ours = python(tmp_path, "s.py"), tpukern_run(tmp_path, "s.py")
    assert ours.returncode == theirs.returncode == -signal.SIGINT
    assert ours.stderr == ENABLED + "EXPLAINED\n" + theirs.stderr


def test_children_started_by_spawn_find_the_script(tmp_path: Path) -> None:
    source = """
        import multiprocessing
        def twice(x): return 2 * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(twice, [1, 2]))
    """
    write(tmp_path, "s.py", source)
    assert tpukern_run(tmp_path, "s.py").stdout == "[2, 4]\n"


def test_options_reach_enable(tmp_path: Path) -> None:
    write(tmp_path, "s.py", "import sys\nprint(sys.argv[1:])\n")
    done = tpukern_run(tmp_path, "--only", "a,b", "--only", "c", "--off", "d", "--opt-in", "e, f", "s.py", "--off", "x")
    assert done.stdout == "['--off', 'x']\n"
    assert done.stderr == 'enable {"only": ["a", "b", "c"], "off": ["d"], "opt_in": ["e", "f"]}\nEXPLAINED\n'


def test_opt_in_all(tmp_path: Path) -> None:
    write(tmp_path, "s.py", "")
    assert 'enable {"only": null, "off": null, "opt_in": "all"}\n' in tpukern_run(tmp_path, "--opt-in", "all", "s.py").stderr


def test_explain_json_is_written_even_if_the_script_fails(tmp_path: Path) -> None:
    write(tmp_path, "s.py", "raise SystemExit(4)")
    done = tpukern_run(tmp_path, "--explain-json", "out.json", "s.py")
    assert done.returncode == 4
    assert json.loads((tmp_path / "out.json").read_text()) == [{"op": "tpukern::fake", "calls": 3}]


@pytest.mark.parametrize(
    ("end", "status"), [("pass", 0), ("raise SystemExit(5)", 5), ("1 / 0", 1), ("raise SystemExit('no')", 1)]
)
def test_json_has_stdout_to_itself(tmp_path: Path, end: str, status: int) -> None:
    source = f"""
        import atexit, os, subprocess, sys
        atexit.register(print, "from atexit")
        print("from python")
        os.write(1, b"from the descriptor\\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"])
        {end}
    """
    write(tmp_path, "s.py", source)
    done = tpukern_run(tmp_path, "--json", "s.py")
    assert done.returncode == status
    assert json.loads(done.stdout) == {
        "device": "emulated",
        "status": status,
        "explain": [{"op": "tpukern::fake", "calls": 3}],
        "left_out": {"aten::mm": "opt-in, not asked for"},
    }
    for line in ("from python\n", "from the descriptor\n", "from a child\n", "from atexit\n"):
        assert line in done.stderr


UNREADABLE = (
    "run[config]: cannot read 'no.py': No such file or directory; expected a Python script, or a folder with a __main__.py."
)
UNWRITABLE = (
    "run[config]: --explain-json 'no/such/place.json' cannot be written: No such file or directory; "
    "expected a file in a folder that exists."
)


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["no.py"], 1, UNREADABLE),
        (["--explain-json", "no/such/place.json", "s.py"], 1, UNWRITABLE),
        ([], 2, "tpukern run: missing argument 'SCRIPT'. See 'tpukern run --help'."),
    ],
)
def test_what_cannot_run_is_said_before_the_device_starts(tmp_path: Path, words: list[str], status: int, message: str) -> None:
    write(tmp_path, "s.py", "")
    done = tpukern_run(tmp_path, *words)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", f"error: {message}\n")
    done = tpukern_run(tmp_path, "--json", *words)
    assert (done.returncode, done.stderr) == (status, "")
    assert json.loads(done.stdout) == {"error": message}


def test_an_explanation_that_cannot_be_written_fails_the_run(tmp_path: Path) -> None:
    write(tmp_path, "s.py", "import os\nos.mkdir('moved')\nos.remove('out.json')\nos.mkdir('out.json')\nprint('ran')\n")
    done = tpukern_run(tmp_path, "--explain-json", "out.json", "s.py")
    assert (done.returncode, done.stdout) == (1, "ran\n")
    message = (
        "explain[override]: cannot write the explanation: [Errno 21] Is a directory: 'out.json'; "
        "expected a place that can be written.\n"
    )
    assert done.stderr == ENABLED + message


MODEL = """
    import sys
    import torch

    x = torch.randn(4, 256, device="tpu", requires_grad=True)
    w = torch.ones(256, device="tpu", requires_grad=True)
    torch.nn.functional.rms_norm(x, (256,), w).sum().backward()
    y = x.detach().cpu().requires_grad_()
    torch.nn.functional.rms_norm(y, (256,), w.detach().cpu()).sum().backward()
    print(sys.argv[1], torch.allclose(x.grad.cpu(), y.grad, atol=1e-5))
    sys.exit(int(sys.argv[1]))
"""
CONSOLE = str(Path(sysconfig.get_path("scripts")) / "tpukern")


def test_a_script_on_the_device_itself(tmp_path: Path) -> None:
    write(tmp_path, "s.py", MODEL)
    command = [CONSOLE, "run", "--only", "rms_norm", "--explain-json", "rows.json", "s.py", "6"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (6, "6 True\n"), done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    ran = {(row["op"], row["kernel"], row["direction"]): row["calls"] for row in rows if row["config"]}
    assert ran == {
        ("aten::_fused_rms_norm", "rms_norm", "forward"): 1,
        ("aten::_fused_rms_norm_backward", "rms_norm_backward", "backward"): 1,
    }
    assert "tpukern: the tpu device is " in done.stderr
    assert "aten::_fused_rms_norm_backward" in done.stderr


def test_an_override_that_there_is_not(tmp_path: Path) -> None:
    write(tmp_path, "s.py", "print('never')")
    command = [CONSOLE, "run", "--json", "--off", "rms_nrm", "s.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert error.startswith("enable[override]: no override 'rms_nrm'; expected one of [")
    assert error.endswith("Did you mean 'rms_norm'.")
