"""Makes the virtual environment of this checkout: everything that `make demo` and `make test` need, from nothing.

Runs on a bare Python (standard library only). PyTorch comes first and alone, as a CPU build: from PyTorch's own index of CPU
wheels if that answers within seconds, else from pip's configured sources. A build that would pull in CUDA is refused before
its libraries are downloaded. Everything else follows from pip's configured sources, with that torch held fixed.

A marker file in the environment says what was installed and whether it was finished: a second run with nothing changed
returns at once, a run that was killed is started afresh by the next, and a folder that this script did not make is left
alone.
"""

from __future__ import annotations  # an older Python must get as far as the message in `check_python`

import argparse
import contextlib
import hashlib
import http.client
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

TORCH = "2.13.0"  # the version that torch_tpu 0.2.0 is built against
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_VARIABLE = "TPUKERN_TORCH_INDEX"
CUDA_VARIABLE = "TPUKERN_ALLOW_CUDA_TORCH"
PROBE_SECONDS = 8.0
DISK_BYTES = 4_000_000_000  # measured: 2.9 GB installed, the rest is pip's unpacking
PYTHONS = ((3, 11), (3, 14))  # torch_tpu has wheels for these
MARKER = "tpukern-install.json"
ON_TPU_PLATFORM = sys.platform == "linux" and platform.machine() == "x86_64"  # where libtpu and torch_tpu have wheels
EXTRAS = "compile,emulator,helion,report,tune,test" if ON_TPU_PLATFORM else "test"


class InstallError(Exception):
    """Something the user has to decide or mend; printed as it is."""


def say(text: str) -> None:
    print(f"install: {text}", flush=True)


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:2])) -> None:
    """Refuses a Python that the pinned wheels do not exist for."""
    low, high = PYTHONS
    if not low <= tuple(version[:2]) <= high:
        raise InstallError(
            "this is Python {}.{}; expected {}.{} to {}.{}, which the pinned packages have wheels for. Install one of them, or "
            "name it: make PYTHON=python3.12".format(*version[:2], *low, *high)
        )


# --- Which torch -----------------------------------------------------------------------------------------------------------


def probe(index: str, seconds: float = PROBE_SECONDS) -> str | None:
    """Returns why `index` cannot serve the pinned torch, or None if it can. Never takes longer than `seconds`."""
    result: list[str | None] = [f"no answer within {seconds:g} s"]

    def ask() -> None:
        try:
            with urllib.request.urlopen(index.rstrip("/") + "/torch/", timeout=seconds) as page:
                listed = f"torch-{TORCH}" in page.read().decode("utf-8", "replace")
            result[0] = None if listed else f"it lists no torch {TORCH}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            result[0] = str(getattr(error, "reason", error)).strip()

    # A thread, since looking up a host name ignores the timeout.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return result[0]


def not_a_cpu_build(metadata: dict) -> str | None:
    """Returns why the wheel with this metadata is no CPU build, or None if it is one."""
    name = f"torch {metadata['version']}"
    local = metadata["version"].partition("+")[2]
    if local == "cpu":
        return None
    if local:
        return f"{name} is a build for {local}"
    if sys.platform != "linux":
        return None  # there are no CUDA builds of torch for macOS
    gpu = sorted({re.split(r"[^\w-]", need)[0] for need in metadata.get("requires_dist", []) if _needs_gpu(need)})
    return f"{name} needs {', '.join(gpu[:3])}{' and more' if gpu[3:] else ''}" if gpu else None


def _needs_gpu(requirement: str) -> bool:
    machines = re.findall(r"platform_machine\s*==\s*[\"'](\w+)", requirement)
    here = not machines or platform.machine() in machines
    return here and "extra ==" not in requirement and bool(re.match(r"(nvidia|cuda|triton|pytorch-triton|rocm)\b", requirement))


class Pip:
    """The environment's pip: everything it says goes to a log, the lines worth reading are shown."""

    def __init__(self, python: Path, log: Path) -> None:
        self.python, self.log = python, log

    def __call__(self, *args: str) -> subprocess.CompletedProcess:
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input", *args]
        lines = []
        with self.log.open("a", encoding="utf-8") as log:
            log.write("$ pip " + " ".join(args) + "\n")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
            )
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                log.flush()
                lines.append(line)
                self.show(line.strip())
            process.wait()
        return subprocess.CompletedProcess(command, process.returncode, "".join(lines))

    @staticmethod
    def show(line: str) -> None:
        big = re.match(r"Downloading (?:\S*/)?(\S+?)(?:\.metadata)? \(([\d.]+) ([MG]B)\)", line)
        if big and (big[3] == "GB" or float(big[2]) >= 5):
            say(f"  downloading {big[1]} ({big[2]} {big[3]})")
        elif line.startswith("Installing collected packages:"):
            say(f"  installing {len(line.split(':', 1)[1].split(','))} packages")

    def must(self, what: str, *args: str) -> None:
        done = self(*args)
        if done.returncode:
            said = [line for line in done.stdout.splitlines() if line.startswith("ERROR")] or done.stdout.splitlines()[-5:]
            raise InstallError(
                f"{what} failed; pip says:\n  " + "\n  ".join(said) + f"\nAll of it is in {self.log}. Run again to go on."
            )

    def metadata(self, requirement: str) -> dict | None:
        """Returns the metadata of the distribution pip would take for `requirement`, or None if its sources have none."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            done = self("install", "--dry-run", "--no-deps", "--ignore-installed", "--report", str(report), requirement)
            if done.returncode == 0:
                return json.loads(report.read_text(encoding="utf-8"))["install"][0]["metadata"]
        if "No matching distribution" in done.stdout:
            return None
        last = done.stdout.strip().rpartition("\n")[2]
        raise InstallError(f"pip cannot look up {requirement}: {last}\nAll it said is in {self.log}.")


def install_torch(pip: Pip) -> str:
    """Installs the pinned torch alone and returns where it came from."""
    index = os.environ.get(INDEX_VARIABLE, TORCH_INDEX)
    wanted = f"torch=={TORCH}+cpu" if sys.platform == "linux" else f"torch=={TORCH}"
    if index:
        problem = probe(index)
        if problem is None:
            say(f"torch {TORCH}, CPU build, from {index}")
            pip.must("installing torch", "install", "--progress-bar", "off", "--no-deps", "--index-url", index, wanted)
            return index
        say(f"{index} cannot be used ({problem})")
        say(f"torch {TORCH} comes from pip's configured sources instead ({INDEX_VARIABLE} names another index)")
    else:
        say(f"torch {TORCH} comes from pip's configured sources, since {INDEX_VARIABLE} is empty")
    metadata = pip.metadata(wanted)
    if metadata is None:
        wanted = f"torch=={TORCH}"
        metadata = pip.metadata(wanted)
    if metadata is None:
        raise InstallError(
            f"pip's configured sources have no torch {TORCH} for this Python. "
            f"Set {INDEX_VARIABLE} to an index of CPU wheels that has it."
        )
    problem = not_a_cpu_build(metadata)
    if problem and os.environ.get(CUDA_VARIABLE) != "1":
        raise InstallError(
            f"pip's configured sources offer no CPU build: {problem}, several GB that a TPU kernel has no use for. "
            f"Set {INDEX_VARIABLE} to an index of CPU wheels (PyTorch's own is {TORCH_INDEX}), or {CUDA_VARIABLE}=1 to take it."
        )
    pip.must("installing torch", "install", "--progress-bar", "off", "--no-deps", wanted)
    return "pip's configured sources"


# --- The environment -------------------------------------------------------------------------------------------------------


def fingerprint(project: Path, venv: Path) -> dict:
    """What an installation depends on. Environments cannot be moved, so the places are part of it."""
    text = (project / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()
    where = f"{project}\n{venv}\n{sys.version}\n{platform.machine()}"
    return {"content": hashlib.sha256(text).hexdigest(), "place": hashlib.sha256(where.encode()).hexdigest()}


def read_marker(venv: Path) -> dict | None:
    try:
        return json.loads((venv / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_marker(venv: Path, state: str, wanted: dict, **more: str) -> None:
    temporary = venv / (MARKER + ".new")
    temporary.write_text(json.dumps({"state": state, **wanted, **more}, indent=1) + "\n", encoding="utf-8")
    temporary.replace(venv / MARKER)


def prepare(venv: Path, wanted: dict) -> Path:
    """Makes `venv` an environment marked as unfinished, empty unless a finished one only needs a change; returns its Python."""
    marker = read_marker(venv)
    python = venv / "bin" / "python"
    if marker is None and venv.exists() and (not venv.is_dir() or any(venv.iterdir())):
        raise InstallError(f"{venv} is there and was not made by this script. Remove it, or name another: make VENV=FOLDER")
    reuse = marker is not None and marker["state"] == "done" and marker["place"] == wanted["place"] and python.exists()
    if not reuse:
        if marker is not None:
            say(f"{venv} is unfinished or of another place or Python: starting afresh")
        venv.mkdir(parents=True, exist_ok=True)
        write_marker(venv, "unfinished", wanted)  # before anything else, so that a killed run is known as ours
        for entry in venv.iterdir():
            if entry.name != MARKER:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        free = shutil.disk_usage(venv).free
        if free < DISK_BYTES:
            raise InstallError(f"{free / 1e9:.1f} GB free where {venv} goes; expected {DISK_BYTES / 1e9:.0f} GB.")
        done = quietly(sys.executable, "-m", "venv", str(venv))
        if done.returncode:
            said = (done.stdout + done.stderr).strip()
            raise InstallError(f"python -m venv failed: {said}\nOn Debian and Ubuntu it is a package: apt install python3-venv")
    write_marker(venv, "unfinished", wanted)
    return python


def quietly(*command: str) -> subprocess.CompletedProcess:
    """Runs a command outside the checkout, without touching a device."""
    calm = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as elsewhere:
        return subprocess.run(
            command, env=calm, cwd=elsewhere, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )


def verify(python: Path) -> str:
    """Returns the version of the torch that was installed, after importing what was installed."""
    code = "import torch, jax, tpukern; print(torch.__version__, torch.version.cuda or '')"
    done = quietly(str(python), "-c", code)
    if done.returncode:
        raise InstallError(f"what was installed does not import:\n{done.stderr.strip()}")
    version, *cuda = done.stdout.split()
    if cuda and os.environ.get(CUDA_VARIABLE) != "1":
        raise InstallError(
            f"torch {version} is a CUDA build. Remove the environment; {INDEX_VARIABLE} says where CPU wheels are."
        )
    return version


@contextlib.contextmanager
def locked(venv: Path):
    """Two runs at once would install into one folder: the second waits for the first."""
    venv.parent.mkdir(parents=True, exist_ok=True)
    with (venv.parent / (venv.name + ".lock")).open("w") as lock:
        with contextlib.suppress(ImportError):
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install(project: Path, venv: Path) -> None:
    """Brings `venv` up to what `project` needs; returns at once if it is."""
    started = time.monotonic()
    wanted = fingerprint(project, venv)
    marker = read_marker(venv)
    unchanged = marker and marker["state"] == "done" and all(marker[key] == wanted[key] for key in wanted)
    if unchanged and (venv / "bin" / "python").exists():
        return
    say(f"into {venv}, with Python {platform.python_version()}")
    if not ON_TPU_PLATFORM:
        here = f"{platform.machine()} {sys.platform}"
        say(f"the tpu device and the TPU compiler exist for x86-64 Linux, not for {here}: kernels run on CPU tensors only")
    python = prepare(venv, wanted)
    pip = Pip(python, venv / "install.log")
    source = install_torch(pip)
    held = venv / "held.txt"
    held.write_text(f"torch=={TORCH}\n", encoding="utf-8")
    say(f"tpukern[{EXTRAS}] from pip's configured sources")
    pip.must(
        "installing tpukern",
        "install",
        "--progress-bar",
        "off",
        "--constraint",
        str(held),
        "--editable",
        f"{project}[{EXTRAS}]",
    )
    version = verify(python)
    write_marker(venv, "done", wanted, torch=version, source=source)
    say(f"done in {time.monotonic() - started:.0f} s: torch {version}")


def main() -> int:
    project = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--project", type=Path, default=project, help="the checkout (default: this one)")
    parser.add_argument("--venv", type=Path, default=None, help="the environment (default: .venv in the checkout)")
    options = parser.parse_args()
    project = options.project.resolve()
    venv = (options.venv or project / ".venv").absolute()
    try:
        check_python()
        with locked(venv):
            install(project, venv)
    except InstallError as error:
        print(f"install: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
