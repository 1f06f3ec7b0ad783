"""Worker processes as the parent sees them: started, fed, timed, killed, replaced.

Why not a ready-made pool: multiprocessing, loky and pebble start a child by importing the user's ``__main__`` again, which
trains the user's model a second time; in the first two a dead child breaks the pool for every job. Here a child is a plain
``python -m tpukern.worker`` over pipes, one thread selects over all of them, and a dead child costs its own job only.
"""

import base64
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tpukern import environment
from tpukern.errors import CompileError
from tpukern.targets import MIB

_START_S = 120.0  # importing JAX takes 1 s on an idle machine
_STDERR_TAIL = 4096  # bytes kept for the report of a crash
_PIPE_BYTES = 65_536
_LOOK_EVERY_S = 0.2  # at what the workers hold, if that is bounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One module to compile.

    Attributes:
        tag: Whatever the caller wants back with the outcome.
        module: The serialized module.
        topology: The topology to compile for.
        options: XLA compiler options.
    """

    tag: Any
    module: bytes
    topology: str
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a task ended: the worker's reply, or why there is none."""

    tag: Any
    reply: Mapping[str, Any] | None = None
    failure: str | None = None


class _Worker:
    """One child process; ``task`` is what it is compiling, None while it starts or idles."""

    def __init__(self, temp_folder: pathlib.Path, schedules: bool) -> None:
        self.temp_folder = temp_folder
        temp_folder.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tpukern.worker"],  # -P: a jax.py in the current folder is not imported
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment.worker_environment(temp_folder, schedules=schedules),
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends its workers
        )
        self.ready = False
        self.task: Task | None = None
        self.deadline = time.monotonic() + _START_S
        self.unsent = self.partial = self.stderr = b""
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)

    @property
    def idle(self) -> bool:
        return self.ready and self.task is None

    def send(self, task: Task, timeout_s: float) -> None:
        """Takes a task; ``write`` sends it."""
        self.task = task
        self.deadline = time.monotonic() + timeout_s
        request = {
            "module": base64.b64encode(task.module).decode(),
            "topology": task.topology,
            "options": dict(task.options),
        }
        self.unsent = json.dumps(request).encode() + b"\n"

    def write(self) -> None:
        """Writes what the pipe takes now; a module can be larger than a pipe, and the process may have stopped reading."""
        assert self.process.stdin is not None
        try:
            self.unsent = self.unsent[os.write(self.process.stdin.fileno(), self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it has died: the end of its stdout will say so
            self.unsent = b""

    def hush(self) -> None:
        """Forgets what libtpu said while it started; it complains wherever there is no TPU."""
        assert self.process.stderr is not None
        _drain(self.process.stderr.fileno())
        self.stderr = b""

    def end(self) -> int:
        """Kills the process if it still runs, and returns its exit status."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if hasattr(os, "killpg"):
                    os.killpg(self.process.pid, signal.SIGKILL)
                else:
                    self.process.kill()
        status = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        shutil.rmtree(self.temp_folder, ignore_errors=True)
        return status

    def epitaph(self, status: int) -> str:
        """Says how the process ended, with the last lines it wrote."""
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        text = self.stderr.decode(errors="replace").strip()
        return f"{how}; its last words: {text[-1500:]}" if text else how


class WorkerPool:
    """Up to ``size`` workers, started as tasks come. Use as a context manager: leaving it ends every worker.

    Args:
        size: How many workers run at once.
        timeout_s: How long one compile may take; its worker is killed then.
        schedules: Whether replies carry the compiler's schedules.
        memory_bytes: How much memory a worker may hold; it is killed beyond that. None: as much as there is.

    Raises:
        CompileError: No worker could be started at all.
    """

    def __init__(
        self, size: int, timeout_s: float, *, schedules: bool = False, memory_bytes: int | None = None
    ) -> None:
        self.size, self.timeout_s, self.schedules, self.memory_bytes = size, timeout_s, schedules, memory_bytes
        self._workers: list[_Worker] = []
        self._waiting: collections.deque[Task] = collections.deque()
        self._outcomes: collections.deque[Outcome] = collections.deque()
        self._selector = selectors.DefaultSelector()
        self._started = 0
        self._ever_ready = False
        try:
            self._folder = pathlib.Path(tempfile.mkdtemp(prefix="tpukern-"))
        except OSError as error:
            raise CompileError(
                "worker",
                f"no temporary folder in {tempfile.gettempdir()}: {error.strerror}",
                do="Free space there, or set TMPDIR.",
            ) from error

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.end()
        self._selector.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pending(self) -> int:
        """Tasks whose outcome has not been collected."""
        return len(self._waiting) + len(self._outcomes) + sum(w.task is not None for w in self._workers)

    @property
    def has_room(self) -> bool:
        """Whether another task is wanted: one more for each worker than it can run, so that none idles."""
        return self.pending < 2 * self.size

    def submit(self, task: Task) -> None:
        """Takes a task; it starts as soon as a worker is free."""
        self._waiting.append(task)
        self._pump(0)

    def collect(self) -> list[Outcome]:
        """Waits until at least one task has ended (or none is left) and returns the outcomes."""
        while not self._outcomes and self.pending:
            self._pump(None)
        ended = list(self._outcomes)
        self._outcomes.clear()
        return ended

    def _pump(self, wait_s: float | None) -> None:
        """Feeds idle workers, then handles what the others say; waits for that until a deadline if ``wait_s`` is None."""
        self._feed()
        if not self._workers:
            return
        if wait_s is None:
            deadlines = [w.deadline for w in self._workers if not w.idle]
            wait_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else 0.0
            if self.memory_bytes is not None:
                wait_s = min(wait_s, _LOOK_EVERY_S)
        for key, _ in self._selector.select(wait_s):
            worker, stream = key.data
            if worker not in self._workers:  # lost a moment ago
                continue
            if stream == "stdin":
                self._write(worker)
            else:
                self._read(worker, stream)
        now = time.monotonic()
        for worker in [w for w in self._workers if not w.idle and now > w.deadline]:
            what = f"no result after {self.timeout_s:g} s" if worker.ready else f"not started after {_START_S:g} s"
            self._lose(worker, f"{what}, and killed")
        self._bound_memory()
        self._feed()

    def _bound_memory(self) -> None:
        for worker in [w for w in self._workers if self.memory_bytes is not None and w.task is not None]:
            held = _resident_bytes(worker.process.pid)
            if self.memory_bytes is not None and held > self.memory_bytes:
                what = f"{held / MIB:,.0f} MiB of memory held, the limit is {self.memory_bytes / MIB:,.0f} MiB"
                self._lose(worker, f"{what}, and killed")

    def _feed(self) -> None:
        for worker in self._workers:
            if worker.idle and self._waiting:
                worker.send(self._waiting.popleft(), self.timeout_s)
                self._write(worker)
        starting = sum(not w.ready for w in self._workers)
        for _ in range(min(self.size - len(self._workers), len(self._waiting) - starting)):
            self._start()

    def _start(self) -> None:
        self._started += 1
        try:
            worker = _Worker(self._folder / str(self._started), self.schedules)
        except OSError as error:
            raise CompileError("worker", f"cannot start {sys.executable}: {error}", do="Check memory and disk.") from error
        self._workers.append(worker)
        for stream in ("stdout", "stderr"):
            self._selector.register(getattr(worker.process, stream), selectors.EVENT_READ, (worker, stream))

    def _write(self, worker: _Worker) -> None:
        """Sends on what is unsent, and has the selector say when more can be."""
        worker.write()
        assert worker.process.stdin is not None
        if worker.unsent and worker.process.stdin not in self._selector.get_map():
            self._selector.register(worker.process.stdin, selectors.EVENT_WRITE, (worker, "stdin"))
        elif not worker.unsent:
            self._forget(worker.process.stdin)

    def _forget(self, pipe: Any) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(pipe)

    def _read(self, worker: _Worker, stream: str) -> None:
        pipe = getattr(worker.process, stream)
        data = os.read(pipe.fileno(), _PIPE_BYTES)
        if stream == "stderr":
            worker.stderr = (worker.stderr + data)[-_STDERR_TAIL:]
            if not data:
                self._forget(pipe)
        elif not data:
            self._lose(worker, None)
        else:
            *lines, worker.partial = (worker.partial + data).split(b"\n")
            for line in lines:
                self._hear(worker, json.loads(line))

    def _hear(self, worker: _Worker, reply: dict[str, Any]) -> None:
        if worker.task is not None:
            self._outcomes.append(Outcome(tag=worker.task.tag, reply=reply))
            worker.task = None
        elif "ready" in reply:
            worker.ready = self._ever_ready = True
            worker.hush()
        else:
            raise CompileError(
                "worker",
                f"libtpu, the TPU compiler, cannot be loaded ({reply['fatal']})",
                do="pip install 'tpukern[compile]'",
            )

    def _lose(self, worker: _Worker, why: str | None) -> None:
        """Removes a worker that died, or that has to; its task fails, and only its task."""
        for pipe in (worker.process.stdin, worker.process.stdout, worker.process.stderr):
            self._forget(pipe)
        assert worker.process.stderr is not None
        if why is None:
            worker.stderr = (worker.stderr + _drain(worker.process.stderr.fileno()))[-_STDERR_TAIL:]
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(5)
        self._workers.remove(worker)
        status = worker.end()
        found = why if why is not None else f"the compile worker ended with {worker.epitaph(status)}"
        if not self._ever_ready:
            raise CompileError("worker", found, do="Run 'tpukern doctor'.")
        task = worker.task
        if task is None and not worker.ready and self._waiting:  # else a worker that never starts would be replaced for ever
            task = self._waiting.popleft()
        if task is not None:
            self._outcomes.append(Outcome(tag=task.tag, failure=found))


def _resident_bytes(process: int) -> int:
    """Returns the memory that a process holds; 0 where the system does not say."""
    try:
        pages = pathlib.Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _drain(descriptor: int) -> bytes:
    """Reads what is in a pipe now, and waits for no more."""
    os.set_blocking(descriptor, False)
    data = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(descriptor, _PIPE_BYTES):
            data += chunk
    return data
