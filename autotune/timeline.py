"""What a replay did when: the transfers, the waits and the bundles between them, to draw or to open in a trace viewer.

found = timeline(bound, target)          # compiles, replays and records
found.as_trace()                          # JSON of the Trace Event Format, which ui.perfetto.dev opens
found.step(steps)                         # the events of a stretch in the middle: about one grid step
"""

import base64
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from tpukern import compiling, environment, lowering, worker_pool
from tpukern.autotune import bundles, chips, estimating, replay
from tpukern.compiling import Job
from tpukern.errors import CompileError, TpukernError
from tpukern.targets import Target

MOST_EVENTS: Final = 200_000  # of one program: a trace of them is 25 MB
LANES: Final = ("compute", "wait", "HBM read", "HBM write")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """A stretch of time on one lane.

    Attributes:
        lane: One of `LANES`: bundles being issued, the core waiting for a transfer, the memory reading or writing.
        begin_us: When it begins, microseconds from the start of the program.
        end_us: When it ends. Of a transfer: when the memory has moved its last byte; its flag is told a latency later.
        bytes: How many a transfer moves; 0 otherwise.
    """

    lane: str
    begin_us: float
    end_us: float
    bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of the program: a kernel, or what XLA put around it.

    Attributes:
        name: Its name in the compiled program.
        begin_us: When it begins.
        end_us: When it ends.
        events: What happened, by time.
    """

    name: str
    begin_us: float
    end_us: float
    events: tuple[Event, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """A replayed program; predicted, not measured.

    Attributes:
        kernel: The kernel's name.
        target: The chip.
        operations: In order.
        gaps: What is not in it.
    """

    kernel: str
    target: str
    operations: tuple[Operation, ...]
    gaps: tuple[str, ...] = ()

    @property
    def longest(self) -> Operation:
        """The operation that takes the most time."""
        return max(self.operations, key=lambda o: o.end_us - o.begin_us)

    def step(self, steps: int) -> tuple[Event, ...]:
        """Returns the events of one step's length in the middle of the longest operation, cut at its borders.

        Args:
            steps: How many grid steps that operation has. Its time over this is taken for a step's length.
        """
        op = self.longest
        length = (op.end_us - op.begin_us) / max(1, steps)
        begin = op.begin_us + (max(1, steps) // 2) * length
        end = begin + length
        inside = (e for e in op.events if e.end_us > begin and e.begin_us < end)
        return tuple(dataclasses.replace(e, begin_us=max(e.begin_us, begin), end_us=min(e.end_us, end)) for e in inside)

    def as_trace(self) -> dict[str, Any]:
        """Returns the timeline in the Trace Event Format, times in microseconds."""
        return {
            "traceEvents": list(self._trace_events()),
            "displayTimeUnit": "ns",
            "otherData": {"kernel": self.kernel, "target": self.target, "source": "replay: predicted, not measured"},
        }

    def _trace_events(self) -> Iterator[dict[str, Any]]:
        yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"{self.kernel} on {self.target} (replay)"}}
        for thread, lane in enumerate(("operation", *LANES)):
            yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": lane}}
            yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
        threads = {lane: thread for thread, lane in enumerate(LANES, 1)}
        for op in self.operations:
            yield _complete(0, op.name, op.begin_us, op.end_us)
            for event in op.events:
                extra = {"args": {"bytes": event.bytes}} if event.bytes else {}
                yield _complete(threads[event.lane], event.lane, event.begin_us, event.end_us) | extra


def _complete(thread: int, name: str, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": thread, "name": name, "ts": begin, "dur": end - begin}


class _Recorder(replay.Memory):
    """A memory that notes what it is asked."""

    def __init__(self, chip: chips.Chip, core: int = 0, sharing: int = 1) -> None:
        super().__init__(chip, core, sharing)
        self.noted: list[tuple[str, float, float, int]] = []

    def copy(self, now: float, kind: str, granules: int, flag: int) -> None:
        busy = self.busy
        super().copy(now, kind, granules, flag)
        if (takes := self.busy - busy) > 0:
            lane = "HBM read" if kind.startswith("hbm") else "HBM write"
            self._note(lane, self.free - takes, self.free, granules * self.granule)

    def wait(self, now: float, flag: int, granules: int) -> float:
        then = super().wait(now, flag, granules)
        if then > now:
            self._note("wait", now, then, 0)
        return then

    def _note(self, lane: str, begin: float, end: float, size: int) -> None:
        if len(self.noted) >= MOST_EVENTS:
            raise bundles.Unread(f"more than {MOST_EVENTS:,} events: choose a smaller workload")
        self.noted.append((lane, begin, end, size))


def timeline(bound: Any, target: Target) -> Timeline:
    """Compiles a kernel, replays the compiler's schedule and records what happens when.

    Args:
        bound: The kernel at its shapes and config.
        target: The chip.

    Raises:
        LowerError: Pallas refuses the kernel.
        CompileError: The compiler refuses it, libtpu is not installed, or the schedule cannot be followed (says why).
    """
    (found,) = timelines([Job(bound=bound, target=target)])
    if isinstance(found, TpukernError):
        raise found
    return found


def timelines(jobs: Sequence[Job], on_result: Callable[[int], None] | None = None) -> list[Timeline | TpukernError]:
    """Records many kernels; each compiles in a worker process, whatever the cache has: it keeps no schedules.

    Args:
        jobs: Bound kernels and chips.
        on_result: Called with the place of each job as it is done.

    Returns:
        For each job, in order, its timeline, or why there is none.

    Raises:
        CompileError: libtpu is not installed, or no worker process starts.
    """
    results: dict[int, Timeline | TpukernError] = {}

    def finish(index: int, found: Timeline | TpukernError) -> None:
        results[index] = found
        if on_result is not None:
            on_result(index)

    def take(outcomes: Sequence[worker_pool.Outcome]) -> None:
        for outcome in outcomes:
            finish(outcome.tag, _of_outcome(jobs[outcome.tag], outcome))

    if not jobs:
        return []
    size = min(environment.compile_workers(), len(jobs))
    with worker_pool.WorkerPool(size, environment.compile_timeout_s(), schedules=True) as pool:
        for index, job in enumerate(jobs):
            try:
                lowered = job.lowered or lowering.lower(job.bound, job.target)
            except TpukernError as error:
                finish(index, error)
                continue
            while not pool.has_room:
                take(pool.collect())
            pool.submit(worker_pool.Task(tag=index, module=lowered.module, topology=job.target.topology, options={}))
        while pool.pending:
            take(pool.collect())
    return [results[index] for index in range(len(jobs))]


def _of_outcome(job: Job, outcome: worker_pool.Outcome) -> Timeline | TpukernError:
    name, chip, reply = job.bound.kernel.name, job.target.name, outcome.reply
    if reply is None:
        return CompileError(name, outcome.failure or "no result", target=chip)
    if not reply["ok"]:
        return compiling.refusal(name, chip, reply["error"])[1]
    texts = {k: zlib.decompress(base64.b64decode(v)).decode() for k, v in reply.get("schedules", {}).items()}
    try:
        return recorded(name, texts, job.target)
    except bundles.Unread as reason:
        expected = "a schedule that can be followed"
        return CompileError(name, f"no timeline: {reason}", expected, "See docs/estimate.md.", target=chip)


def recorded(name: str, texts: dict[str, str], target: Target) -> Timeline:
    """Replays the schedules of a compiled program and records what happens when.

    Args:
        name: The kernel's name.
        texts: Schedules by operation, and that of the program around them.
        target: The chip.

    Raises:
        Unread: A schedule is missing or cannot be followed.
    """
    chip, operations, now, cores = chips.chip(target), [], 0.0, False
    for schedule in estimating.schedules_in_order(texts):
        split = any(op.note == bundles.CORE_ID for bundle in schedule.bundles for op in bundle)
        memory = _Recorder(chip, 0, sharing=2 if split else 1)
        _, cycles = replay.function_of(schedule, target.name)(memory)
        cores = cores or split
        operations.append(_operation(schedule.name, memory, cycles, now, 1e6 / chip.clock_hz))
        now = operations[-1].end_us
    gaps = ("of a kernel that both cores share, the first core is shown, with half of the bandwidth",) if cores else ()
    return Timeline(kernel=name, target=target.name, operations=tuple(operations), gaps=gaps)


def _operation(name: str, memory: _Recorder, cycles: float, begin: float, us: float) -> Operation:
    events = [Event(lane=lane, begin_us=begin + b * us, end_us=begin + e * us, bytes=n) for lane, b, e, n in memory.noted]
    end = begin + cycles * us
    at = begin
    for wait in [e for e in events if e.lane == "wait"]:
        if wait.begin_us > at:
            events.append(Event(lane="compute", begin_us=at, end_us=wait.begin_us))
        at = wait.end_us
    if end > at:
        events.append(Event(lane="compute", begin_us=at, end_us=end))
    return Operation(name=name, begin_us=begin, end_us=end, events=tuple(sorted(events, key=lambda e: (e.begin_us, e.lane))))
