"""The bootstrap against a package index served here: what it takes from where, refuses, repairs and leaves alone."""

import base64
import hashlib
import http.server
import importlib.util
import inspect
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tools" / "bootstrap.py"


def load() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bootstrap = load()


def write_wheel(folder: Path, name: str, version: str, code: str, requires: tuple[str, ...] = ()) -> Path:
    """Writes a pure Python wheel that holds one module."""
    info, path = f"{name}-{version}.dist-info", folder / f"{name}-{version}-py3-none-any.whl"
    extras = re.findall(r"extra == '(\w+)'", " ".join(requires))
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join([f"Provides-Extra: {e}\n" for e in extras] + [f"Requires-Dist: {r}\n" for r in requires])
    files = {f"{name}.py": code, f"{info}/METADATA": metadata}
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = []
    for file, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{file},sha256={digest},{len(text.encode())}\n")
    files[f"{info}/RECORD"] = "".join(rows) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    return path


class Index(http.server.ThreadingHTTPServer):
    """Two indexes: `/cpu` (PyTorch's) and `/all` (pip's configured source), each a folder of wheels by project."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.folder, self.asked, self.hold = folder, list[str](), threading.Event()
        self.hold.set()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"

    def add(self, index: str, name: str, version: str, code: str = "", requires: tuple[str, ...] = ()) -> None:
        folder = self.folder / index / name.replace("_", "-")
        folder.mkdir(parents=True, exist_ok=True)
        write_wheel(folder, name, version, code, requires)


class Page(http.server.BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        here = self.server.folder / self.path.strip("/").replace("%2B", "+")
        if here.is_dir():
            links = (f'<a href="{file.name.replace("+", "%2B")}">{file.name}</a>' for file in sorted(here.iterdir()))
            body = "<!doctype html><html><body>" + "\n".join(links) + "</body></html>"
            self.answer(200, body.encode(), "text/html")
        elif here.is_file():
            if here.name.startswith("jax-"):
                self.server.hold.wait(120)
            self.answer(200, here.read_bytes(), "application/octet-stream")
        else:
            self.answer(404, b"", "text/plain")

    def answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


BACKEND = """
import sys
sys.path.insert(0, {tests!r})
def get_requires_for_build_editable(settings=None):
    return []
def build_editable(folder, settings=None, metadata=None):
    from pathlib import Path
    from wheels import write_wheel
    return write_wheel(Path(folder), "tpukern", "0.1.0", "", {requires!r}).name
"""

CPU_TORCH = "class version: cuda = None\n__version__ = '2.13.0+cpu'\n"
CUDA_TORCH = "class version: cuda = '13.0'\n__version__ = '2.13.0'\n"
EXTRAS = bootstrap.EXTRAS.split(",")


class Checkout:
    """A project with a pyproject.toml, its indexes, and the bootstrap run on it."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index, self.venv = folder, index, folder / "checkout" / ".venv"
        self.project = folder / "checkout"
        self.project.mkdir()
        self.declare("torch>=2.13", "jax")
        index.add("all", "jax", "0.10.2")
        index.add("all", "nvidia_cublas", "13.0.0")

    def declare(self, *requires: str) -> None:
        """Writes the project, with a build backend of its own, as there is no index to take setuptools from."""
        extras = tuple(f"six_{extra}==1.0; extra == '{extra}'" for extra in EXTRAS)
        for extra in EXTRAS:
            self.index.add("all", f"six_{extra}", "1.0")
        source = "\n".join(["import base64, hashlib, re, zipfile", "from pathlib import Path", inspect.getsource(write_wheel)])
        (self.project / "wheels.py").write_text(source)
        (self.project / "backend.py").write_text(BACKEND.format(tests=str(self.project), requires=(*requires, *extras)))
        (self.project / "pyproject.toml").write_text(
            f'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n# {requires}\n'
            '[project]\nname = "tpukern"\nversion = "0.1.0"\n'
        )

    def environment(self, torch_index: str | None = None, **more: str) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "TPUKERN_"))}
        clean |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": self.index.url("all"), "PIP_NO_CACHE_DIR": "1"}
        return clean | {"TPUKERN_TORCH_INDEX": self.index.url("cpu") if torch_index is None else torch_index} | more

    def start(self, torch_index: str | None = None, **more: str) -> subprocess.Popen[str]:
        words = [sys.executable, str(SCRIPT), "--project", str(self.project), "--venv", str(self.venv)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(words, env=self.environment(torch_index, **more), text=True, start_new_session=True, **pipes)

    def run(self, torch_index: str | None = None, **more: str) -> tuple[int, str, str]:
        process = self.start(torch_index, **more)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    def installed(self) -> dict[str, str]:
        """Name and version of what is in the environment, without pip and setuptools."""
        code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
        done = subprocess.run([str(self.venv / "bin" / "python"), "-I", "-c", code], capture_output=True, text=True, check=True)
        return {name: version for name, version in json.loads(done.stdout).items() if name not in ("pip", "setuptools")}


WHOLE = {"torch": "2.13.0+cpu", "jax": "0.10.2", "tpukern": "0.1.0", **{f"six_{extra}": "1.0" for extra in EXTRAS}}


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    server = Index(tmp_path / "index")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.hold.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def checkout(tmp_path: Path, index: Index) -> Checkout:
    return Checkout(tmp_path, index)


def closed_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}/cpu"


# --- Where torch comes from --------------------------------------------------------------------------------------------------


def test_from_pytorch_s_index_then_nothing_then_only_what_changed(checkout: Checkout, index: Index) -> None:
    index.add("cpu", "torch", "2.13.0+cpu", CPU_TORCH, ("nothing_like_it",))
    index.add("all", "torch", "2.13.0", CUDA_TORCH, ("nvidia-cublas",))
    index.add("all", "nothing_like_it", "1.0")
    status, out, err = checkout.run()
    assert (status, err) == (0, "")
    assert f"install: torch 2.13.0, CPU build, from {index.url('cpu')}\n" in out
    assert checkout.installed() == {**WHOLE, "nothing_like_it": "1.0"}
    assert not any("nvidia" in path for path in index.asked)
    assert json.loads((checkout.venv / "tpukern-install.json").read_text())["state"] == "done"

    index.asked.clear()
    assert checkout.run() == (0, "", "")
    assert index.asked == []

    kept = checkout.venv / "kept"
    kept.touch()
    index.add("all", "more", "1.0")
    checkout.declare("torch>=2.13", "jax", "more")
    status, out, err = checkout.run()
    assert (status, err) == (0, "")
    assert kept.exists(), "a finished environment is added to, not started afresh"
    assert checkout.installed() == {**WHOLE, "nothing_like_it": "1.0", "more": "1.0"}


def test_from_pip_s_sources_where_the_index_is_out_of_reach(checkout: Checkout, index: Index) -> None:
    index.add("all", "torch", "2.13.0+cpu", CPU_TORCH)
    index.add("all", "torch", "2.13.1", CUDA_TORCH, ("nvidia-cublas",))
    away = closed_port()
    status, out, err = checkout.run(away)
    assert (status, err) == (0, "")
    assert f"install: {away} cannot be used ([Errno 111] Connection refused)\n" in out
    assert (
        "install: torch 2.13.0 comes from pip's configured sources instead (TPUKERN_TORCH_INDEX names another index)\n" in out
    )
    assert checkout.installed() == WHOLE
    assert not any("nvidia" in path for path in index.asked)


def test_a_cuda_build_is_refused_before_its_libraries_are_asked_for(checkout: Checkout, index: Index) -> None:
    index.add("all", "torch", "2.13.0", CUDA_TORCH, ("nvidia-cublas; platform_system == 'Linux'", "jax"))
    status, out, err = checkout.run("")
    assert status == 1
    assert out.endswith("install: torch 2.13.0 comes from pip's configured sources, since TPUKERN_TORCH_INDEX is empty\n")
    assert err == (
        "install: pip's configured sources offer no CPU build: torch 2.13.0 needs nvidia-cublas, several GB that a TPU kernel "
        "has no use for. Set TPUKERN_TORCH_INDEX to an index of CPU wheels (PyTorch's own is "
        "https://download.pytorch.org/whl/cpu), or TPUKERN_ALLOW_CUDA_TORCH=1 to take it.\n"
    )
    assert not any("nvidia" in path for path in index.asked)
    assert checkout.installed() == {}

    status, out, err = checkout.run("", TPUKERN_ALLOW_CUDA_TORCH="1")
    assert (status, err) == (0, "")
    assert checkout.installed() == {**WHOLE, "torch": "2.13.0", "nvidia_cublas": "13.0.0"}


def test_no_torch_anywhere(checkout: Checkout) -> None:
    status, _, err = checkout.run("")
    assert (status, err) == (
        1,
        "install: pip's configured sources have no torch 2.13.0 for this Python. "
        "Set TPUKERN_TORCH_INDEX to an index of CPU wheels that has it.\n",
    )


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"version": "2.13.0+cpu", "requires_dist": ["nvidia-cublas"]}, None),
        ({"version": "2.13.0+cu130"}, "torch 2.13.0+cu130 is a build for cu130"),
        ({"version": "2.13.0+rocm7"}, "torch 2.13.0+rocm7 is a build for rocm7"),
        ({"version": "2.13.0", "requires_dist": ["sympy>=1.13.3", "networkx"]}, None),
        ({"version": "2.13.0"}, None),
        ({"version": "2.13.0", "requires_dist": ["triton>=3; extra == 'opt'"]}, None),
        ({"version": "2.13.0", "requires_dist": ["triton==3.6; platform_machine == 'sparc'"]}, None),
        ({"version": "2.13.0", "requires_dist": ["sympy", "cuda-bindings<14,>=13"]}, "torch 2.13.0 needs cuda-bindings"),
        (
            {"version": "2.13.0", "requires_dist": ["triton==3.6", "nvidia-nccl==2", "nvidia-cudnn", "nvidia-cublas>1"]},
            "torch 2.13.0 needs nvidia-cublas, nvidia-cudnn, nvidia-nccl and more",
        ),
    ],
)
def test_what_a_cpu_build_is(metadata: dict[str, object], problem: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert bootstrap.not_a_cpu_build(metadata) == problem


def test_an_index_that_does_not_answer_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        started = time.monotonic()
        problem = bootstrap.probe(f"http://127.0.0.1:{silent.getsockname()[1]}/cpu", seconds=0.5)
        assert time.monotonic() - started < 5
    assert problem in ("no answer within 0.5 s", "timed out")

    released = threading.Event()

    def look_up(*words: object, **more: object) -> None:
        released.wait(60)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    started = time.monotonic()
    assert bootstrap.probe("http://pytorch.invalid/whl/cpu", seconds=0.5) == "no answer within 0.5 s"
    assert time.monotonic() - started < 5
    released.set()
    assert bootstrap.PROBE_SECONDS <= 10


def test_an_index_that_answers_something_else() -> None:
    with socket.socket() as odd:
        odd.bind(("127.0.0.1", 0))
        odd.listen()

        def answer() -> None:
            with odd.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"220 mail.example\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        assert bootstrap.probe(f"http://127.0.0.1:{odd.getsockname()[1]}/cpu") == "220 mail.example"
        answering.join()


def test_an_index_without_this_torch(index: Index) -> None:
    index.add("cpu", "torch", "2.12.0+cpu", CPU_TORCH)
    assert bootstrap.probe(index.url("cpu")) == "it lists no torch 2.13.0"
    assert bootstrap.probe(index.url("none")) == "Not Found"
    assert bootstrap.probe("no url") == "unknown url type: 'no url/torch/'"
    index.add("cpu", "torch", "2.13.0+cpu", CPU_TORCH)
    assert bootstrap.probe(index.url("cpu") + "/") is None


# --- Half-done, foreign and impossible ---------------------------------------------------------------------------------------


def test_a_killed_install_is_repaired(checkout: Checkout, index: Index) -> None:
    index.add("cpu", "torch", "2.13.0+cpu", CPU_TORCH)
    index.hold.clear()  # the download of jax hangs: torch is installed by then, the rest is not
    process = checkout.start()
    try:
        for _ in range(1200):
            if any("jax-0" in path for path in index.asked):
                break
            assert process.poll() is None
            time.sleep(0.1)
        assert json.loads((checkout.venv / "tpukern-install.json").read_text())["state"] == "unfinished"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        index.hold.set()
    assert "torch" in checkout.installed()
    assert "jax" not in checkout.installed()

    status, out, err = checkout.run()
    assert (status, err) == (0, "")
    assert f"install: {checkout.venv} is unfinished or of another place or Python: starting afresh\n" in out
    assert checkout.installed() == WHOLE


def test_what_pip_says_is_shown_and_the_next_run_goes_on(checkout: Checkout, index: Index) -> None:
    index.add("cpu", "torch", "2.13.0+cpu", CPU_TORCH)
    checkout.declare("torch>=2.13", "jax", "absent_package")
    status, _, err = checkout.run()
    assert status == 1
    assert err.startswith("install: installing tpukern failed; pip says:\n  ERROR: Could not find a version that satisfies")
    assert f"All of it is in {checkout.venv / 'install.log'}. Run again to go on.\n" in err
    assert "absent_package" in (checkout.venv / "install.log").read_text()

    index.add("all", "absent_package", "1.0")
    assert checkout.run()[0] == 0
    assert checkout.installed() == {**WHOLE, "absent_package": "1.0"}


def test_a_folder_of_someone_else_s_is_left_alone(checkout: Checkout) -> None:
    checkout.venv.mkdir()
    (checkout.venv / "precious").write_text("mine")
    status, out, err = checkout.run()
    assert status == 1
    assert err == (
        f"install: {checkout.venv} is there and was not made by this script. Remove it, or name another: make VENV=FOLDER\n"
    )
    assert [entry.name for entry in checkout.venv.iterdir()] == ["precious"]
    assert "into" in out


@pytest.mark.parametrize("version", [(3, 10), (3, 15), (4, 0)])
def test_a_python_without_wheels(version: tuple[int, int]) -> None:
    with pytest.raises(bootstrap.InstallError) as caught:
        bootstrap.check_python(version)
    assert str(caught.value) == (
        f"this is Python {version[0]}.{version[1]}; expected 3.11 to 3.14, which the pinned packages have wheels for. "
        "Install one of them, or name it: make PYTHON=python3.12"
    )


@pytest.mark.parametrize("version", [(3, 11), (3, 14)])
def test_a_python_with_wheels(version: tuple[int, int]) -> None:
    bootstrap.check_python(version)


# --- The Makefile ------------------------------------------------------------------------------------------------------------


MAKE = shutil.which("make") or "make"


def make(*words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    env["PATH"] = env["PATH"] if path is None else str(path)
    return subprocess.run([MAKE, "-C", str(ROOT), *words], env=env, capture_output=True, text=True, timeout=60)


def test_make_finds_the_python_it_needs(tmp_path: Path) -> None:
    """`python3` is too old here, `python3.12` is broken, `python3.11` will do."""
    for name, does in (("python3", "exit 1"), ("python3.12", "exit 127"), ("python3.11", "exit 0"), ("sh", "")):
        if name == "sh":
            (tmp_path / name).symlink_to("/bin/sh")
        else:
            (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
            (tmp_path / name).chmod(0o755)
    done = make("-n", "install", path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'python3.11 tools/bootstrap.py --venv ".venv"' in done.stdout

    (tmp_path / "python3.11").unlink()
    done = make("-n", "install", path=tmp_path)
    assert done.returncode == 2
    assert "No Python 3.11 to 3.14 found: install one, or name it with make PYTHON=..." in done.stderr


@pytest.mark.parametrize("goal", ["demo", "test", "lint"])
def test_every_goal_installs_first(goal: str) -> None:
    done = make("-n", goal, "VENV=elsewhere", "PYTHON=python9")
    assert done.returncode == 0, done.stderr
    install, rest = done.stdout.split('python9 tools/bootstrap.py --venv "elsewhere"\n')
    assert "elsewhere" not in install
    assert '"elsewhere/bin/' in rest


def test_continuous_integration_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "exec make test </dev/null\n" in script.read_text()
