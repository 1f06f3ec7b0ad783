"""What happens while kernels run under Pallas' TPU interpreter, and what of it is a fault."""

import ast
import contextlib
import dataclasses
import math
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tpukern.testing import jaxprs

_MOST_FINDINGS = 8
_FIRST_BUFFER, _FIRST_SEMAPHORE = 100, 2000  # the interpreter's numbering, anew for every kernel (jax 0.10.2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault.

    Attributes:
        kind: `race` | `uninitialised` | `out_of_bounds` | `hang` | `order` (a result that depends on the order of parallel
            grid steps, or a block written twice with others between) | `semaphore` (not zero at the end) | `error`.
        kernel: Name of the `pallas_call`.
        what: What was found.
        grid_step: The step it was found in, None if that is not known.
        source: "file:line (function)" in the kernel, None if that is not known.
    """

    kind: str
    kernel: str
    what: str
    grid_step: tuple[int, ...] | None = None
    source: str | None = None

    def __str__(self) -> str:
        step = "" if self.grid_step is None else f" in grid step {self.grid_step}"
        return f"{self.kind} in {self.kernel}{step}: {self.what}" + (f" [{self.source}]" if self.source else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What is known beforehand of one `pallas_call`.

    Attributes:
        name: Its name.
        buffers: Names of its buffers, in the order in which the interpreter allocates them.
        semaphores: Names of its semaphores, likewise.
        waits: Source lines of its semaphore waits (the interpreter does not say which one hangs).
    """

    name: str
    buffers: tuple[str, ...]
    semaphores: tuple[str, ...]
    waits: tuple[str, ...]


def describe(eqn: jaxprs.Eqn, source_line: Any) -> Call:
    """Describes a `pallas_call` equation."""
    mapping, body = eqn.params["grid_mapping"], eqn.params["jaxpr"]
    names = list(body.debug_info.arg_names or ())
    names = [*names, *(f"operand {i}" for i in range(len(names), len(body.invars)))]
    first, inputs, outputs = mapping.num_index_operands, mapping.num_inputs, mapping.num_outputs
    aliased = {out for _, out in eqn.params["input_output_aliases"]}
    spaces = [str(getattr(v.aval, "memory_space", None)).lower() for v in body.invars]
    hbm = [f"{name} in HBM" for name in names[first : first + inputs]]
    hbm += [f"{n} in HBM" for i, n in enumerate(names[first + inputs : first + inputs + outputs]) if i not in aliased]
    local, semaphores = [], []
    for i, (name, space) in enumerate(zip(names, spaces, strict=True)):
        if "semaphore" in space:
            size = math.prod(body.invars[i].aval.shape)
            semaphores += [name] if size == 1 else [f"{name}[{k}]" for k in range(size)]
        elif i >= first and ("hbm" not in space and "any" not in space):
            local.append(name)
    waits = [source_line(e) for e in jaxprs.equations(body) if e.primitive.name == "semaphore_wait"]
    return Call(
        name=jaxprs.kernel_name(eqn),
        buffers=(*hbm, *names[:first], *local),
        semaphores=tuple(semaphores),
        waits=tuple(dict.fromkeys(waits)),
    )


class Hang(Exception):
    """Raised inside the interpreter to end it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wait:
    semaphore: Any
    value: int
    source: str | None


class Watch:
    """Follows one run; see `jax_adapter.InterpreterWatch` for who calls what.

    Attributes:
        findings: The faults so far.
        steps: Grid steps begun.
        poison: The first read, by a kernel's body, of memory that holds what uninitialised memory is filled with.
    """

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.findings: list[Finding] = []
        self.steps = 0
        self.poison: Finding | None = None
        self._memory: Any = None
        self._call: Call | None = None
        self._points: dict[int, dict[tuple[int, ...], None]] = {}
        self._waiting: dict[int, _Wait] = {}
        self._stopped = False
        self._lock = threading.RLock()

    # --- what the interpreter and the kernels report

    def started(self, memory: Any) -> None:
        with self._lock:
            self._memory, self._points, self._waiting = memory, {}, {}

    def step(self, call: Call, point: Sequence[Any], core: Any) -> None:
        """A core begins a grid step."""
        with self._lock:
            self._call = call
            self._points.setdefault(int(core), {})[tuple(int(i) for i in point)] = None
            self.steps += 1
        self.beat()

    def beat(self) -> None:
        """A loop in a kernel goes round: ends it if the run is to end."""
        if self._stopped:
            stop = Hang()
            self._memory.set_failed(stop, top_level=self.cores == 1)
            raise stop

    def read(self, key: tuple[str, int, int, int], content: Any, source: str | None) -> None:
        if source is None or self.poison is not None or content is None or not poisoned(content):
            return
        self.poison = self._finding("uninitialised", f"{self.buffer(key)} is read before it is written", key[2:], source)

    @contextlib.contextmanager
    def waits(self, semaphore: Any, value: int, core: int, source: str | None) -> Iterator[None]:
        with self._lock:
            self._waiting[core] = _Wait(semaphore=semaphore, value=value, source=source)
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(core, None)

    def failed(self, exception: Exception) -> None:
        text = str(exception)
        if isinstance(exception, Hang | threading.BrokenBarrierError) or "Computation failed on device" in text:
            return  # the echo of another failure
        kind = "out_of_bounds" if "ut-of-bounds" in text else "order" if "Revisited block" in text else "error"
        place = re.search(r"\((\d+) (\d+) (\w+) (\d+)\)", text)
        at = (0, 0)
        if place:
            at = (int(place[1]), int(place[2]))
            text = text.replace(place[0], self.buffer((place[3], int(place[4]), *at)))
        text = text if kind != "error" else f"{type(exception).__name__}: {text}"
        self._add(self._finding(kind, _tidy(text), at))

    def printed(self, text: str) -> None:
        sides = re.findall(r"^\s*(read|write) of (\(.*?\))\[(.*)\] from (\d+), (\d+),? (.*)$", text, re.MULTILINE)
        if "RACE" in text and len(sides) == 2:
            (first, key, _, device, core, line), (second, _, _, _, _, other) = sides
            what = f"a {first} of {self.buffer(ast.literal_eval(key))} is not ordered with a {second} of it at {other}"
            self._add(self._finding("race", what, (int(device), int(core)), line))
            return
        semaphore = re.search(r"Semaphore (\d+) has non-zero count .*: (-?\d+)$", text.replace("\n", " "))
        if semaphore:
            name = self.semaphore(int(semaphore[1]))
            self._add(self._finding("semaphore", f"{name} is {semaphore[2]} at the end of the kernel; expected 0", None))
        else:
            self._add(self._finding("race" if "RACE" in text else "error", _tidy(text), None))

    # --- what the thread that waits for the run asks

    @property
    def hung(self) -> bool:
        """Whether the run was ended."""
        return self._stopped

    def blocked(self) -> bool:
        """Whether every core waits on what no core is left to give."""
        with self._lock:
            memory, waiting = self._memory, dict(self._waiting)
        if memory is None or not waiting:
            return False
        for core, wait in waiting.items():
            with wait.semaphore.cv:
                if wait.semaphore.count_by_core[core] >= wait.value or wait.semaphore.tasks[core]:
                    return False
        at_barriers = memory.barrier.n_waiting + memory.clean_up_barrier.n_waiting
        return bool(len(waiting) + at_barriers * self.cores >= memory.num_cores)

    def stop(self, why: str) -> None:
        """Ends the run, as a hang."""
        with self._lock:
            waiting = sorted(self._waiting.items())
            texts = []
            for core, wait in waiting:
                device, local = divmod(core, self.cores)
                lines = (wait.source,) if wait.source else self._call.waits if self._call else ()
                where = f" at {' or '.join(lines)}" if lines else ""
                has = int(wait.semaphore.count_by_core[core])
                step = self.grid_step(device, local)
                texts.append(
                    f"device {device} core {local} in grid step {step} waits{where} for {self.semaphore(wait.semaphore.id)} "
                    f"to reach {wait.value}; it is {has}"
                )
            at = divmod(waiting[0][0], self.cores) if waiting else (0, 0)
            source = waiting[0][1].source if waiting else None
            self._add(self._finding("hang", "; ".join([why, *texts]), at, source))
            self._stopped = True
        if self._memory is not None:
            self._memory.set_failed(Hang(), top_level=False)

    # --- names

    def grid_step(self, device: int, core: int) -> tuple[int, ...] | None:
        """Returns the grid step that a core is in."""
        points = list(self._points.get(core, ()))
        if self._memory is None or not points:
            return None
        done = len(self._memory.output_ranges.get((device, core), ()))
        return points[min(done, len(points) - 1)]

    def buffer(self, key: tuple[str, int, int, int]) -> str:
        """Returns the name of a buffer."""
        space, number, *_ = key
        names = self._call.buffers if self._call else ()
        at = int(number) - _FIRST_BUFFER
        return names[at] if 0 <= at < len(names) else f"a scoped {str(space).upper()} buffer"

    def semaphore(self, number: int) -> str:
        """Returns the name of a semaphore."""
        names = self._call.semaphores if self._call else ()
        at = number - _FIRST_SEMAPHORE
        if at < 0:
            return f"the barrier semaphore of collective {number}"
        return f"semaphore {names[at]}" if at < len(names) else "a scoped semaphore"

    def _finding(self, kind: str, what: str, at: Sequence[int] | None, source: str | None = None) -> Finding:
        step = None if at is None or at[0] >= _FIRST_BUFFER else self.grid_step(at[0], at[1])
        name = self._call.name if self._call else "kernel"
        return Finding(kind=kind, kernel=name, what=what, grid_step=step, source=source)

    def _add(self, finding: Finding) -> None:
        with self._lock:
            known = any(dataclasses.replace(f, grid_step=finding.grid_step) == finding for f in self.findings)
            if not known and len(self.findings) < _MOST_FINDINGS:
                self.findings.append(finding)


def poisoned(content: np.ndarray) -> bool:
    """Whether an array holds a value that uninitialised memory is filled with: NaN, or the largest integer."""
    if content.dtype == np.bool_:
        return False
    if np.issubdtype(content.dtype, np.integer):
        return bool((content == np.iinfo(content.dtype).max).any())
    with contextlib.suppress(ValueError, TypeError):
        ml_dtypes.finfo(content.dtype)
        return bool(np.isnan(content).any())
    return False


def _tidy(text: str) -> str:
    """Puts a message on one line."""
    return re.sub(r"\s+", " ", text).strip().rstrip(".").strip()
