"""How long a kernel takes on a chip that is not there.

Two sources, the better first. `replay`: the compiler's own schedule, run (`autotune.replay`); every operation of the compiled
program is added up, XLA's copies around the kernel included. `roofline`: the least time that units and memory allow, where the
schedule cannot be had or followed; the estimate then says why, in `gaps`.
"""

import base64
import dataclasses
import hashlib
import pathlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tpukern import cache as caching
from tpukern import compiling, environment, jax_adapter, lowering, value_names, worker_pool
from tpukern.autotune import bundles, chips, rejecting, replay, roofline
from tpukern.compiling import Job
from tpukern.errors import CompileError, ConfigError, TpukernError, did_you_mean
from tpukern.targets import Target
from tpukern.targets import target as target_named

REPLAY: Final = "replay"
ROOFLINE: Final = "roofline"
_OUTER: Final = "TLP"  # libtpu's name for the program that runs the operations


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One operation of the compiled program.

    Attributes:
        name: Its name there; the kernel's own, with a number, for a `pallas_call`.
        us: How long it takes, microseconds.
        compute_us: Of that, bundles being issued.
        wait_us: Of that, waiting for DMAs.
        hbm_us: How long the memory moves its bytes, beside both.
        hbm_bytes: How many those are.
    """

    name: str
    us: float
    compute_us: float
    wait_us: float
    hbm_us: float
    hbm_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A predicted time; nothing was measured.

    Attributes:
        kernel: The kernel's name.
        direction: "forward" or "backward".
        workload: Name of the workload, or None.
        target: The chip.
        config: Block sizes and choices, as text.
        source: Where `us` comes from: "replay" of the compiler's schedule, or "roofline", a bound from below.
        us: Microseconds from the first operation to the last, launching it not included.
        cycles: The same in cycles of the core.
        compute_us: Bundles being issued (replay), or the matrix units at their peak (roofline).
        hbm_us: The memory moving bytes.
        wait_us: The core waiting for DMAs; None for a roofline.
        bound_by: "compute", "memory" or "latency": neither is busy for four fifths of the time.
        flops: Multiplications and additions in dots that every grid step makes.
        mxu_share: `flops` over what the chip's peak would do in that time.
        hbm_bytes: Bytes moved to and from HBM.
        hbm_share: `hbm_bytes` over what the published bandwidth would move in that time.
        vmem_bytes: VMEM on the kernel's stack, as the compiler says; None if it was not asked.
        vmem_limit_bytes: What the kernel may use of it.
        parts: The operations of the program, in order; empty for a roofline.
        gaps: What the figures leave out, and why a better source failed.
        versions: Of libtpu and jax.
    """

    kernel: str
    direction: str
    workload: str | None
    target: str
    config: str
    source: str
    us: float
    cycles: int
    compute_us: float
    hbm_us: float
    wait_us: float | None
    bound_by: str
    flops: int
    mxu_share: float
    hbm_bytes: int
    hbm_share: float
    vmem_bytes: int | None
    vmem_limit_bytes: int
    parts: tuple[Part, ...] = ()
    gaps: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return dataclasses.asdict(self)


def estimate(
    kernel: Any,
    *args: Any,
    target: Target | str,
    workload: str | None = None,
    direction: str = "forward",
    config: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Estimate:
    """Predicts how long a kernel takes on a chip, without one. Nothing is measured: see `Estimate.source` and `gaps`.

    Args:
        kernel: The kernel.
        args: Its inputs: arrays or anything with a shape and a dtype. None if a workload is named.
        target: The chip.
        workload: Name of one of the kernel's workloads.
        direction: "forward" or "backward", for a workload.
        config: Some or all config keys; the default config of the target fills in the rest.
        keywords: Static arguments and config keys.

    Raises:
        ConfigError: No such target, workload, direction or config.
        SignatureError: The inputs do not fit.
        LowerError: Pallas refuses the kernel.
        CompileError: The compiler refuses it, or libtpu is not installed.
    """
    chip = target_named(target) if isinstance(target, str) else target
    if workload is None:
        bound = kernel.bind(*args, config=config, target=chip, **keywords)
    else:
        bound = of_workload(kernel, workload, direction, {**(config or {}), **keywords}, chip)
    (found,) = estimate_many([Job(bound=bound, target=chip, direction=direction, workload=workload)])
    if isinstance(found, TpukernError):
        raise found
    return found


def of_workload(kernel: Any, name: str, direction: str, config: Mapping[str, Any], target: Target) -> Any:
    """Returns a kernel bound to one of its workloads.

    Raises:
        ConfigError: No such workload, direction or config.
    """
    workloads = {w.name: w for w in kernel.workloads}
    if name not in workloads:
        raise ConfigError(kernel.name, f"no workload {name!r}", f"one of {list(workloads)}", did_you_mean(name, workloads))
    if direction not in kernel.directions or direction not in workloads[name].directions:
        raise ConfigError(kernel.name, f"no direction {direction!r}", f"one of {list(kernel.directions)}")
    chosen = kernel.directions[direction]
    return chosen.bind_signature(chosen.workload_signature(workloads[name]), config=config, target=target)


def estimate_many(
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    timeout_s: float | None = None,
    use_cache: bool = True,
    on_result: Callable[[int, Estimate | TpukernError], None] | None = None,
    pool: worker_pool.WorkerPool | None = None,
) -> list[Estimate | TpukernError]:
    """Predicts many kernels' times; each compiles in a worker process.

    Args:
        jobs: Bound kernels and chips.
        workers: How many compile at once; None for one a core.
        timeout_s: How long one compile may take.
        use_cache: Whether results are looked up on disk; new ones are kept either way.
        on_result: Called with the place of a job and its result, as they come.
        pool: Workers that give schedules, for many calls; None starts some for this one.

    Returns:
        For each job, in order, its estimate, or why there is none.

    Raises:
        CompileError: libtpu is not installed, or no worker process starts.
    """
    run = _Run(jobs, on_result)
    missing = run.look_up() if use_cache else list(range(len(jobs)))
    if missing and pool is not None:
        run.through(pool, missing)
    elif missing:
        size = min(workers or environment.compile_workers(), len(missing))
        with worker_pool.WorkerPool(size, timeout_s or environment.compile_timeout_s(), schedules=True) as own:
            run.through(own, missing)
    return [run.results[index] for index in range(len(jobs))]


class _Run:
    """The state of one `estimate_many`."""

    def __init__(self, jobs: Sequence[Job], on_result: Callable[[int, Estimate | TpukernError], None] | None) -> None:
        self.jobs, self.on_result = jobs, on_result
        self.results: dict[int, Estimate | TpukernError] = {}
        self.cache = caching.Cache()
        around = compiling.surroundings({}) if jobs else {}
        self.keys = [_key(job, around) for job in jobs]

    def look_up(self) -> list[int]:
        """Takes what the cache knows, and returns the places of the others."""
        missing = []
        for index, key in enumerate(self.keys):
            known = None if key is None else self.cache.get(key)
            if known is None:
                missing.append(index)
            else:
                self._finish(index, _from_json(self.jobs[index], known))
        return missing

    def through(self, pool: worker_pool.WorkerPool, missing: Sequence[int]) -> None:
        """Compiles what is missing; lowering and replaying here go on beside the workers."""
        for index in missing:
            while not pool.has_room:
                self.take(pool.collect())
            if (task := self.task(index)) is not None:
                pool.submit(task)
        while pool.pending:
            self.take(pool.collect())

    def task(self, index: int) -> worker_pool.Task | None:
        job = self.jobs[index]
        try:
            rejecting.check(job)
            lowered = job.lowered or lowering.lower(job.bound, job.target)
        except TpukernError as error:
            self._finish(index, error)
            return None
        return worker_pool.Task(tag=index, module=lowered.module, topology=job.target.topology, options={})

    def take(self, outcomes: Sequence[worker_pool.Outcome]) -> None:
        for outcome in outcomes:
            index = outcome.tag
            found = _judged(self.jobs[index], outcome)
            key = self.keys[index]
            if key is not None and isinstance(found, Estimate):
                self.cache.put(key, found.as_json())
            self._finish(index, found)

    def _finish(self, index: int, found: Estimate | TpukernError) -> None:
        self.results[index] = found
        if self.on_result is not None:
            self.on_result(index, found)


def _key(job: Job, around: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what an estimate depends on; None if it cannot be kept."""
    kernel: Any = job.bound.kernel
    if caching.is_outdated(kernel):
        return None
    try:
        key = compiling.key(job.bound, job.target, kernel.source_digest(), around)
    except value_names.Unkeyable:
        return None
    return key | {"estimate": _own_digest()}


def key_of(job: Job) -> dict[str, Any] | None:
    """Returns what a job's estimate depends on, as JSON; None if it cannot be kept."""
    return _key(job, compiling.surroundings({}))


def versions() -> dict[str, str]:
    """Returns the versions that estimates depend on."""
    return {"libtpu": compiling.libtpu_version(), **jax_adapter.versions()}


def _own_digest() -> str:
    files = [pathlib.Path(module.__file__ or "") for module in (bundles, chips, replay, roofline)] + [pathlib.Path(__file__)]
    return value_names.digest([hashlib.sha256(f.read_bytes()).hexdigest() for f in files])


def _from_json(job: Job, value: Mapping[str, Any]) -> Estimate:
    own = {"direction": job.direction, "workload": job.workload}
    parts = tuple(Part(**part) for part in value["parts"])
    return Estimate(**{**value, **own, "parts": parts, "gaps": tuple(value["gaps"])})


def _judged(job: Job, outcome: worker_pool.Outcome) -> Estimate | TpukernError:
    """Turns a worker's reply into an estimate; a schedule that cannot be followed leaves the roofline."""
    name, reply = job.bound.kernel.name, outcome.reply
    if reply is None:
        return CompileError(name, outcome.failure or "no result", target=job.target.name)
    if not reply["ok"]:
        return compiling.refusal(name, job.target.name, reply["error"])[1]
    texts = {k: zlib.decompress(base64.b64decode(v)).decode() for k, v in reply.get("schedules", {}).items()}
    bound: Any = job.bound
    counted = roofline.work(bound.calls)
    try:
        runs = replayed(texts, job.target)
    except bundles.Unread as reason:
        return _lower_bound(job, counted, reply["vmem_bytes"], f"no replay: {reason}")
    return _from_runs(job, counted, reply["vmem_bytes"], runs, texts)


def replayed(texts: Mapping[str, str], target: Target) -> tuple[replay.Run, ...]:
    """Replays every operation of a compiled program, in its order.

    Args:
        texts: Schedules by operation, and that of the program around them.
        target: The chip.

    Raises:
        Unread: This libtpu was not tested, a schedule is missing, or one cannot be followed.
    """
    return tuple(replay.run(schedule, chips.chip(target)) for schedule in schedules_in_order(texts))


def schedules_in_order(texts: Mapping[str, str]) -> tuple[bundles.Schedule, ...]:
    """Reads the schedule of every operation of a compiled program, in the program's order.

    Raises:
        Unread: This libtpu was not tested, a schedule is missing, or one cannot be read.
    """
    version = compiling.libtpu_version()
    if version not in bundles.TESTED_LIBTPU:
        raise bundles.Unread(f"libtpu {version}; schedules of {', '.join(bundles.TESTED_LIBTPU)} can be read")
    if _OUTER not in texts:
        raise bundles.Unread("libtpu wrote no schedule of the program")
    names = bundles.operations(texts[_OUTER])
    if missing := [name for name in names if name not in texts]:
        raise bundles.Unread(f"libtpu wrote no schedule of {', '.join(missing)}")
    return tuple(bundles.read(name, texts[name]) for name in names)


def _from_runs(
    job: Job, counted: roofline.Work, vmem: int | None, runs: Sequence[replay.Run], texts: Mapping[str, str]
) -> Estimate:
    chip = chips.chip(job.target)
    parts = tuple(
        Part(
            name=run.name,
            us=1e6 * run.cycles / chip.clock_hz,
            compute_us=1e6 * run.bundles / chip.clock_hz,
            wait_us=1e6 * run.waits / chip.clock_hz,
            hbm_us=1e6 * run.busy / chip.clock_hz,
            hbm_bytes=run.read_bytes + run.written_bytes,
        )
        for run in runs
    )
    gaps = list(counted.gaps)
    near = sum(bundles.operands_in_vmem(texts[run.name]) for run in runs if _is_kernel(run.name, job))
    if near:
        gaps.append(f"{near} inputs are in VMEM when a kernel starts, put there by XLA: fetching them is not in the time")
    us = sum(part.us for part in parts)
    return _estimate(
        job, counted, vmem, REPLAY, us, compute_us=sum(p.compute_us for p in parts), hbm_us=sum(p.hbm_us for p in parts),
        wait_us=sum(p.wait_us for p in parts), hbm_bytes=sum(p.hbm_bytes for p in parts), parts=parts, gaps=tuple(gaps),
    )  # fmt: skip


def _is_kernel(name: str, job: Job) -> bool:
    bound: Any = job.bound
    return any(name.rpartition(".")[0] == call.name or name == call.name for call in bound.calls)


def _lower_bound(job: Job, counted: roofline.Work, vmem: int | None, reason: str) -> Estimate:
    compute, memory = counted.seconds(chips.chip(job.target))
    return _estimate(
        job, counted, vmem, ROOFLINE, 1e6 * max(compute, memory), compute_us=1e6 * compute, hbm_us=1e6 * memory,
        wait_us=None, hbm_bytes=counted.bytes, parts=(), gaps=(reason, *counted.gaps),
    )  # fmt: skip


def _estimate(
    job: Job,
    counted: roofline.Work,
    vmem: int | None,
    source: str,
    us: float,
    *,
    compute_us: float,
    hbm_us: float,
    wait_us: float | None,
    hbm_bytes: int,
    parts: tuple[Part, ...],
    gaps: tuple[str, ...],
) -> Estimate:
    bound: Any = job.bound
    chip = chips.chip(job.target)
    seconds = us * 1e-6
    limits = [call.vmem_limit_bytes or job.target.scoped_vmem_bytes for call in bound.calls]
    slowest, longest = ("compute", compute_us) if compute_us >= hbm_us else ("memory", hbm_us)
    return Estimate(
        kernel=bound.kernel.name,
        direction=job.direction,
        workload=job.workload,
        target=job.target.name,
        config=str(getattr(bound, "config", "")),
        source=source,
        us=us,
        cycles=round(seconds * chip.clock_hz),
        compute_us=compute_us,
        hbm_us=hbm_us,
        wait_us=wait_us,
        bound_by=slowest if longest >= 0.8 * us else "latency",
        flops=counted.flops,
        mxu_share=counted.flops / (seconds * chip.peak_flops) if us else 0.0,
        hbm_bytes=hbm_bytes,
        hbm_share=hbm_bytes / (seconds * chip.hbm_bytes_per_s) if us else 0.0,
        vmem_bytes=vmem,
        vmem_limit_bytes=max(limits, default=job.target.scoped_vmem_bytes),
        parts=parts,
        gaps=gaps,
        versions=versions(),
    )
