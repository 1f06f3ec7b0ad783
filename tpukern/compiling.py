"""Lowered -> Compiled: the real TPU compiler's verdict and figures, from worker processes, kept on disk.

The user's process never loads libtpu. A compile that crashes, hangs or is killed is that job's failed result.
"""

import contextlib
import dataclasses
import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpukern import cache as caching
from tpukern import environment, jax_adapter, lowering, value_names, worker_pool
from tpukern.errors import CompileError, TpukernError
from tpukern.lowering import Lowerable, Lowered
from tpukern.targets import MIB, Target

_NO_LIBTPU = "libtpu, the TPU compiler, is not installed"
_INSTALL = "pip install 'tpukern[compile]'"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One thing to compile. It is lowered only if the cache has no result for it.

    Attributes:
        bound: The kernel at its shapes and config.
        target: The chip.
        direction: "forward" or "backward": a label for the result.
        workload: Name of the workload the shapes come from, a label too.
        lowered: The same, already lowered.
    """

    bound: Lowerable
    target: Target
    direction: str = "forward"
    workload: str | None = None
    lowered: Lowered | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the TPU compiler made of one kernel for one chip.

    Attributes:
        kernel: The kernel's name.
        direction: "forward" or "backward".
        workload: Name of the workload, or None.
        shapes: Shape of each input, in order.
        dtype: Element type of the first floating-point input.
        config: The block sizes and choices, as text.
        target: The chip's name.
        ok: Whether it compiled.
        seconds: What the compiler took, when it was last asked. Lowering and starting the worker are not in it.
        vmem_bytes: VMEM that the kernel has on its stack: windows with all their buffers, scratch, and Mosaic's own
            temporaries. libtpu's figure from the finished executable (``used_scoped_memory_configs`` of the custom call), the
            one that it compares with the scoped VMEM limit. Arrays that XLA keeps in VMEM around the kernel are not in it, and
            have no windows. Of several kernels, the largest. For an overflow, what was asked for. None if not known.
        code_bytes: Size of the whole program's machine code, XLA's part included (``generated_code_size_in_bytes`` of the
            executable). None if it did not compile.
        digest: ``Lowered.digest``: equal digests are the same code. None if it could not be lowered.
        cached: Whether the result was on disk.
        error: Why not ok, in the form of ``tpukern.errors``; else None.
    """

    kernel: str
    direction: str
    workload: str | None
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    config: str
    target: str
    ok: bool
    seconds: float
    vmem_bytes: int | None
    code_bytes: int | None
    digest: str | None
    cached: bool
    error: str | None

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return dataclasses.asdict(self) | {"shapes": [list(shape) for shape in self.shapes]}


def compile(what: Lowered | Lowerable, target: Target | str | None = None, **keywords: Any) -> Compiled:
    """Compiles one kernel for one chip, without a TPU. A refusal is a result with ``ok`` false, not an exception.

    Args:
        what: A ``Lowered``, or a ``Bound``, which is lowered if the cache has no result for it.
        target: The chip, for a ``Bound`` that was bound for none.
        **keywords: ``timeout_s``, ``options``, ``use_cache`` of ``compile_many``.

    Raises:
        CompileError: libtpu is not installed, or no worker process starts.
    """
    if isinstance(what, Lowered):
        job = Job(bound=what.bound, target=what.target, lowered=what)
    else:
        job = Job(bound=what, target=lowering.resolve_target(what, target))
    return compile_many([job], workers=1, **keywords)[0]


def compile_many(
    jobs: Sequence[Job],
    workers: int | None = None,
    on_result: Callable[[Compiled], None] | None = None,
    *,
    timeout_s: float | None = None,
    options: Mapping[str, bool | int | float | str] | None = None,
    use_cache: bool = True,
) -> list[Compiled]:
    """Compiles many kernels in worker processes.

    Args:
        jobs: What to compile. Jobs that mean the same are compiled once.
        workers: How many processes run at once; None: ``environment.compile_workers()``.
        on_result: Called in this thread with each result as it comes.
        timeout_s: How long one compile may take; None: ``environment.compile_timeout_s()``.
        options: XLA options such as ``{"xla_tpu_scoped_vmem_limit_kib": 65536}``. Part of the cache key.
        use_cache: Whether results are looked up on disk. New ones are kept either way.

    Returns:
        One result for each job, in their order.

    Raises:
        CompileError: libtpu is not installed, or no worker process starts.
    """
    run = _Run(jobs, dict(options or {}), on_result)
    missing = run.look_up() if use_cache else list(range(len(jobs)))
    if not missing:
        return run.results()
    workers = min(workers or environment.compile_workers(), len(missing))
    with worker_pool.WorkerPool(workers, timeout_s or environment.compile_timeout_s()) as pool:
        for index in missing:
            task = run.task(index)
            while task is not None and not pool.has_room:
                run.take(pool.collect())
            if task is not None:
                pool.submit(task)
        while pool.pending:
            run.take(pool.collect())
    return run.results()


def libtpu_version() -> str:
    """Returns the version of the installed libtpu, from its metadata: loads nothing.

    Raises:
        CompileError: It is not installed.
    """
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        raise CompileError("tpukern", _NO_LIBTPU, do=_INSTALL) from None


def surroundings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what every compile of this process depends on, as JSON."""
    return {
        "road": caching.road_digest(),
        "options": value_names.stable(dict(options)),
        "jax_settings": value_names.stable(jax_adapter.trace_settings()),
        "versions": jax_adapter.versions() | {"libtpu": libtpu_version(), "python": caching.interpreter()},
    }


def key(bound: Lowerable, target: Target, source: str, around: Mapping[str, Any]) -> dict[str, Any]:
    """Returns everything that a compile's result depends on, as JSON.

    Args:
        bound: The kernel at its shapes and config.
        target: The chip.
        source: The kernel's ``source_digest()``.
        around: ``surroundings()``.

    Raises:
        Unkeyable: A static argument cannot be named by its content; the result is then not kept.
    """
    signature = getattr(bound, "signature", None)
    return {
        **around,
        "kernel": bound.kernel.name,
        "source": source,
        "config": value_names.stable(dict(getattr(bound, "config", None) or {})),
        "statics": value_names.stable(dict(getattr(signature, "statics", None) or {})),
        "inputs": [[list(spec.shape), str(spec.dtype)] for spec in bound.specs],
        "target": [target.name, target.topology, target.device_kind],
    }


class _Run:
    """The state of one ``compile_many``: which jobs have results, and which wait for another job's."""

    def __init__(
        self, jobs: Sequence[Job], options: dict[str, Any], on_result: Callable[[Compiled], None] | None
    ) -> None:
        self.jobs, self.options, self.on_result = jobs, options, on_result
        self.cache = caching.Cache()
        self.digests: dict[int, str] = {}
        self.twins: dict[int, list[int]] = {}
        self._results: dict[int, Compiled] = {}
        self._sources: dict[int, str | None] = {}
        around = surroundings(options) if jobs else {}
        self.keys = [self._key(job, around) for job in jobs]

    def _key(self, job: Job, around: Mapping[str, Any]) -> dict[str, Any] | None:
        source = self._source(job.bound.kernel)
        if source is None:
            return None
        with contextlib.suppress(value_names.Unkeyable):
            return key(job.bound, job.target, source, around)
        return None

    def _source(self, kernel: Any) -> str | None:
        """The digest of a kernel's source, read once a run; None if the files are not what runs."""
        if id(kernel) not in self._sources:
            digest = kernel.source_digest()
            self._sources[id(kernel)] = None if caching.is_outdated(kernel) else digest
        return self._sources[id(kernel)]

    def look_up(self) -> list[int]:
        """Gives results to the jobs that the cache knows, and returns the others, each meaning once."""
        missing: list[int] = []
        first: dict[str, int] = {}
        for index, name in enumerate(self.keys):
            value = None if name is None else self.cache.get(name)
            if value is not None:
                self._finish(index, value, cached=True)
            elif name is not None and (twin := first.setdefault(value_names.digest(name), index)) != index:
                self.twins.setdefault(twin, []).append(index)
            else:
                missing.append(index)
        return missing

    def task(self, index: int) -> worker_pool.Task | None:
        """Lowers a job; None if that failed, which is then its result."""
        job = self.jobs[index]
        try:
            lowered = job.lowered or lowering.lower(job.bound, job.target)
        except TpukernError as error:
            self._finish(index, _value(ok=False, seconds=0.0, error=str(error)), cached=False)
            return None
        self.digests[index] = lowered.digest
        if lowered.vmem_bytes > job.target.vmem_bytes:  # libtpu needs minutes to say so
            refused = _overflow(job.bound.kernel.name, job.target.name, "VMEM", lowered.vmem_bytes, job.target.vmem_bytes)
            value = _value(digest=lowered.digest, vmem_bytes=lowered.vmem_bytes, error=str(refused))
            if (name := self.keys[index]) is not None:
                self.cache.put(name, value)
            self._finish(index, value, cached=False)
            return None
        return worker_pool.Task(tag=index, module=lowered.module, topology=job.target.topology, options=self.options)

    def take(self, outcomes: Sequence[worker_pool.Outcome]) -> None:
        """Turns what the workers said into results, and keeps those that would come out the same again."""
        for outcome in outcomes:
            job = self.jobs[outcome.tag]
            value = _verdict(job, outcome) | {"digest": self.digests[outcome.tag]}
            reply = outcome.reply or {}
            name = self.keys[outcome.tag]
            if name is not None and (value["ok"] or (reply.get("stage") == "compile" and reply["type"] != "MemoryError")):
                self.cache.put(name, value)
            self._finish(outcome.tag, value, cached=False)

    def _finish(self, index: int, value: Mapping[str, Any], *, cached: bool) -> None:
        for each in (index, *self.twins.get(index, ())):
            self._results[each] = _compiled(self.jobs[each], value, cached=cached)
            if self.on_result is not None:
                self.on_result(self._results[each])

    def results(self) -> list[Compiled]:
        """Returns the results in the order of the jobs."""
        return [self._results[index] for index in range(len(self.jobs))]


def _value(**fields: Any) -> dict[str, Any]:
    return {"ok": False, "seconds": 0.0, "vmem_bytes": None, "code_bytes": None, "digest": None, "error": None} | fields


def _compiled(job: Job, value: Mapping[str, Any], *, cached: bool) -> Compiled:
    bound: Any = job.bound
    floats = [str(spec.dtype) for spec in bound.specs if "float" in str(spec.dtype)]
    return Compiled(
        kernel=bound.kernel.name,
        direction=job.direction,
        workload=job.workload,
        shapes=tuple(tuple(spec.shape) for spec in bound.specs),
        dtype=floats[0] if floats else (str(bound.specs[0].dtype) if bound.specs else ""),
        config=str(getattr(bound, "config", "")),
        target=job.target.name,
        cached=cached,
        **value,
    )


def _verdict(job: Job, outcome: worker_pool.Outcome) -> dict[str, Any]:
    name, chip = job.bound.kernel.name, job.target.name
    if outcome.reply is None:
        error = CompileError(name, outcome.failure or "no result", target=chip)
        return _value(error=str(error))
    reply = outcome.reply
    if reply["ok"]:
        return _value(ok=True, **{field: reply[field] for field in ("seconds", "vmem_bytes", "code_bytes")})
    needed, error = refusal(name, chip, reply["error"])
    return _value(seconds=reply["seconds"], vmem_bytes=needed, error=str(error))


_SIZE = r"([\d.]+)([KMG]?)"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_OVERFLOWS = (  # libtpu 0.0.51: the scoped limit (E1001), the whole of VMEM, one window larger than VMEM (v4)
    (re.compile(rf"Scoped allocation with size {_SIZE} and limit {_SIZE} exceeded"), "scoped VMEM"),
    (re.compile(rf"Ran out of memory in memory space vmem\. Used {_SIZE} of {_SIZE} vmem"), "VMEM"),
    (re.compile(rf"Allocation \(size={_SIZE}\) would exceed memory \(size={_SIZE}\)(?=.*space=vmem)", re.DOTALL), "VMEM"),
)


def refusal(name: str, target: str, text: str) -> tuple[int | None, CompileError]:
    """Puts a refusal by the compiler in our form.

    Returns:
        The VMEM asked for, in bytes, if it is an overflow of VMEM, and the error.
    """
    for pattern, space in _OVERFLOWS:
        if found := pattern.search(text):
            used, limit = (int(float(found[i]) * _UNITS[found[i + 1]]) for i in (1, 3))
            return used, _overflow(name, target, space, used, limit)
    return None, CompileError(name, _condensed(text), "a kernel that the TPU compiler accepts", target=target)


def _overflow(name: str, target: str, space: str, used: int, limit: int) -> CompileError:
    raise_it = ", or raise vmem_limit_bytes" if space == "scoped VMEM" else ""
    return CompileError(
        name,
        f"{used / MIB:.2f} MiB of {space} needed",
        f"at most {limit / MIB:.2f} MiB",
        f"Choose smaller blocks{raise_it}.",
        target=target,
    )


def _condensed(text: str) -> str:
    """The compiler's reason, its operation and the kernel's line, without its request to report a bug."""
    text = text.split("Please report a bug")[0]
    place = re.search(r'at location: .*?"([^"]+)":(\d+):\d+', text, re.DOTALL)
    text = re.sub(r"at location: .*?\n", "", text)
    words = " ".join(text.split()).rstrip(" .:")[:1500]
    return f"{words}, at {place[1]}:{place[2]}" if place else words
