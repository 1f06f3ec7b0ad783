"""The autotuner: the space of a kernel, tried in compile workers, the winner checked and put on record.

One way for all kernels: what the rules and the VMEM bound refuse costs nothing, the rest compiles in worker processes that stay
alive from one config and kernel to the next, and the compiler's schedule is replayed while they compile. The default config is
tried first, and what is recorded is never worse by the same kind of estimate. A kernel that only calls others (most gradients)
is tuned by its parts: their times add up, so each part is searched by itself, and the whole is estimated for the best of each.
"""

import collections
import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from tpukern import environment, lowering, value_names, worker_pool
from tpukern.autotune import estimating, recalling, recording, searching, verifying
from tpukern.autotune.recording import Record, Store
from tpukern.autotune.trials import Log, Trial
from tpukern.compiling import Job
from tpukern.dsl import Config, Kernel, Signature, declared
from tpukern.errors import ConfigError, RecordError, TpukernError, TuneError
from tpukern.targets import Target
from tpukern.targets import target as target_named
from tpukern.version import __version__

TIMEOUT_S: Final = 120.0  # of one compile; a big attention takes 30 s
_CHECKED: Final = 4  # configs whose numerics are looked at before it is given up
_KINDS: Final = (
    ("no result after", "time-out"),
    ("of memory held", "memory"),
    ("compile worker ended with", "crash"),
    ("VMEM needed", "VMEM"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """How much may be tried; None is no bound.

    Attributes:
        configs: Configs for each kernel, signature and target; those of earlier runs count.
        seconds: For everything together.
    """

    configs: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, value: "int | str | Budget | None") -> "Budget":
        """Reads 40 (configs each), "90s", "10m" or "2h".

        Raises:
            ConfigError: It is none of these.
        """
        if value is None or isinstance(value, Budget):
            return value or cls()
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)", str(value).strip())
        if found:
            return cls(seconds=float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[found[2]])
        if isinstance(value, bool) or not re.fullmatch(r"[1-9]\d*", str(value).strip()):
            raise ConfigError("tune", f"budget {value!r}", "a number of configs, or a time such as 90s, 10m or 2h")
        return cls(configs=int(value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What is tuned.

    Attributes:
        kernel: The kernel of one direction.
        signature: Its call.
        target: The chip.
        workload: Name of the workload that the call is of, or None.
    """

    kernel: Kernel
    signature: Signature
    target: Target
    workload: str | None = None

    @property
    def direction(self) -> str:
        return "forward" if self.kernel.forward is None else "backward"

    def job(self, config: Config) -> Job:
        """Returns what has to be compiled to try a config.

        Raises:
            TpukernError: The kernel refuses it.
        """
        bound = self.kernel.bind_signature(self.signature, config, self.target)
        return Job(bound=bound, target=self.target, direction=self.direction, workload=self.workload)

    def described(self) -> dict[str, Any]:
        """Returns what tells it apart from others, as JSON."""
        return {
            "kernel": self.kernel.name,
            "target": self.target.name,
            "workload": self.workload,
            "sizes": dict(self.signature.sizes),
            "inputs": [o.dtype for o in self.signature.inputs],
            "statics": {name: repr(value) for name, value in self.signature.statics.items()},
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """What a search found.

    Attributes:
        kernel: The kernel's name.
        direction: "forward" or "backward".
        workload: Name of the workload, or None.
        target: The chip.
        sizes: Size of every dim.
        config: The best config.
        us: Its time, microseconds.
        source: Where the times come from: "replay", "measured".
        default_config: The config without a record.
        default_us: Its time from the same source; None if it failed.
        trials: All that was tried, in order; of a kernel tuned by its parts, those of the whole.
        space: How many legal configs there are.
        tried: How many were tried, parts included.
        failures: How many failed, by kind.
        verified: How the results were checked.
        stopped: Why not all of the space was tried: "", "budget" or "strategy".
        seconds: How long it took.
        path: The file it is on record in; None if it is not.
        problem: Why it is not on record, if it was to be.
    """

    kernel: str
    direction: str
    workload: str | None
    target: str
    sizes: Mapping[str, int]
    config: Config
    us: float
    source: str
    default_config: Config
    default_us: float | None
    trials: tuple[Trial, ...]
    space: int
    tried: int
    failures: Mapping[str, int]
    verified: str
    stopped: str
    seconds: float
    path: str | None = None
    problem: str | None = None

    @property
    def speedup(self) -> float | None:
        """The default config's time over the best one's."""
        return None if self.default_us is None else self.default_us / self.us

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        own = {"config": dict(self.config), "default_config": dict(self.default_config), "speedup": self.speedup}
        return fields | own | {"sizes": dict(self.sizes), "trials": [trial.as_json() for trial in self.trials]}


@dataclasses.dataclass
class State:
    """How far a search is, for who watches it."""

    problem: Problem
    total: int
    done: int = 0
    failed: int = 0
    best: Trial | None = None
    default: Trial | None = None


Watch = Callable[[State, Trial], None]


class Tuner:
    """Tunes kernels, one after the other, with the same workers. Use as a context manager.

    Args:
        workers: How many configs compile at once; None for one a core.
        timeout_s: How long one compile may take.
        memory_bytes: How much memory a worker may hold; None: `environment.compile_memory_bytes()`.
        strategy: "auto", "exhaustive" or "optuna".
        record: Whether results go on record.
        store: Where; None: the user's records.
        fresh: Whether earlier trials are done again.
        watch: Called with the state of the search after each trial.
        measure: Takes jobs and a callback instead of estimating: what measures on a device.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        timeout_s: float | None = None,
        memory_bytes: int | None = None,
        strategy: str = "auto",
        record: bool = True,
        store: Store | None = None,
        fresh: bool = False,
        watch: Watch | None = None,
        measure: Callable[..., None] | None = None,
    ) -> None:
        if strategy not in searching.STRATEGIES:
            raise ConfigError("tune", f"no strategy {strategy!r}", f"one of {list(searching.STRATEGIES)}")
        self.workers = workers or environment.compile_workers()
        self.timeout_s = timeout_s or TIMEOUT_S
        self.memory_bytes = memory_bytes or environment.compile_memory_bytes()
        self.strategy, self.record, self.store, self.fresh = strategy, record, store or Store(), fresh
        self.watch, self.measure = watch, measure
        self._pool: worker_pool.WorkerPool | None = None
        self._parts: dict[Any, Tuned] = {}

    def __enter__(self) -> "Tuner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.__exit__(kind, error, traceback)
            self._pool = None

    def tune(self, problem: Problem, budget: Budget | None = None, deadline: float | None = None) -> Tuned:
        """Finds the best config for a problem, checks it and puts it on record.

        Args:
            problem: What to tune.
            budget: How much may be tried.
            deadline: When to stop, by `time.monotonic`; the default config is tried all the same.

        Raises:
            TuneError: The space is empty, every config fails, no schedule can be followed, or all results are wrong.
            CompileError: libtpu is not installed, or no worker process starts.
        """
        limits = budget or Budget()
        if deadline is None and limits.seconds is not None:
            deadline = time.monotonic() + limits.seconds
        search = _Search(self, problem, limits.configs, deadline)
        parts = search.parts()
        tuned = search.of_parts(parts) if parts else search.of_space()
        if not self.record:
            return tuned
        record = _record(problem, tuned)
        if record is None:
            return dataclasses.replace(tuned, problem="a static argument cannot be named by its content")
        try:
            (path,) = self.store.add([record])
        except RecordError as error:
            return dataclasses.replace(tuned, problem=str(error))
        recalling.forget((*declared.kernels(), problem.kernel))
        return dataclasses.replace(tuned, path=str(path))

    def part(self, problem: Problem, configs: int | None, deadline: float | None) -> Tuned:
        """Tunes a kernel that another one calls; once, however many call it so."""
        key = problem.kernel.name, problem.signature, problem.target
        if key not in self._parts:
            self._parts[key] = self.tune(problem, Budget(configs=configs), deadline)
        return self._parts[key]

    def evaluate(self, jobs: Sequence[Job], on_result: Callable[[int, Any], None]) -> None:
        """Tries what is bound; results come in any order."""
        if self.measure is not None:
            self.measure(jobs, on_result)
            return
        if self._pool is None:
            self._pool = worker_pool.WorkerPool(
                self.workers, self.timeout_s, schedules=True, memory_bytes=self.memory_bytes
            )
        estimating.estimate_many(jobs, on_result=on_result, pool=self._pool, use_cache=not self.fresh)


class _Search:
    """The search for one problem."""

    def __init__(self, tuner: Tuner, problem: Problem, configs: int | None, deadline: float | None) -> None:
        self.tuner, self.problem, self.configs, self.deadline = tuner, problem, configs, deadline
        self.log = Log(problem.kernel.name, problem.target.name)
        self.trials: dict[Config, Trial] = {}
        self.state = State(problem=problem, total=0)
        self.began = time.monotonic()
        self.space = 0
        self.stopped = ""

    @property
    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    # --- a kernel with a space of its own

    def of_space(self) -> Tuned:
        """Searches the kernel's configs."""
        p = self.problem
        default = self._default()
        space = searching.legal_configs(p.kernel, p.signature, p.target)
        self.space = len(space)
        recorded = p.kernel.default_config(p.signature, p.target)
        first = list(dict.fromkeys(config for config in (default, recorded) if config is not None))
        rest = [config for config in space if config not in first]
        strategy = searching.strategy_of(self.tuner.strategy, p.kernel.name, rest)
        most = self.configs or (len(space) if isinstance(strategy, searching.Listed) else searching.SMALL)
        self.state.total = max(min(len(rest) + len(first), most), 1)
        self.state.total = min(self.state.total, len(rest) + len(first))
        batch = first[: max(most, 1)]
        while batch:
            for trial in self._try(batch):
                strategy.tell(trial.config, trial.us)
            left = most - len(self.trials)
            if left <= 0 or self._late:
                break
            batch = strategy.ask(min(left, 2 * self.tuner.workers))
        if len(self.trials) < len(rest) + len(first):
            self.stopped = "budget" if self.configs or self._late else "strategy"
        return self._winner(default)

    def _default(self) -> Config | None:
        p = self.problem
        try:
            return p.kernel.declared_config(p.signature, p.target)
        except TpukernError:
            return None

    def _try(self, configs: Sequence[Config]) -> list[Trial]:
        """Tries configs, and returns their trials in order; what is known from earlier runs is not done again."""
        jobs: list[tuple[Config, str | None, Job]] = []
        for config in configs:
            try:
                job = self.problem.job(config)
            except TpukernError as error:
                self._note(config, None, _failed(config, error))
                continue
            key = trial_key(job) if self.tuner.measure is None else None
            known = self.log.get(key) if key is not None and not self.tuner.fresh else None
            if known is not None:
                self._note(config, None, dataclasses.replace(known, config=config))
            else:
                jobs.append((config, key, job))

        def take(index: int, found: Any) -> None:
            config, key, _ = jobs[index]
            self._note(config, key, _trial(config, found))

        if jobs:
            self.tuner.evaluate([job for *_, job in jobs], take)
        return [self.trials[config] for config in configs]

    def _note(self, config: Config, key: str | None, trial: Trial) -> None:
        self.trials[config] = trial
        if key is not None:
            self.log.put(key, self.problem.described(), trial)
        self.state.done += 1
        self.state.failed += trial.us is None
        if trial.us is not None and (self.state.best is None or trial.us < (self.state.best.us or 0.0)):
            self.state.best = trial
        if self.tuner.watch is not None:
            self.tuner.watch(self.state, trial)

    # --- a kernel that only calls others

    def parts(self) -> list[tuple[Any, Problem]]:
        """Returns the kernels that it calls, if all of its config is theirs."""
        p = self.problem
        if p.kernel.is_tile or p.kernel.helion is not None or p.kernel.declaration.keys:
            return []
        return [
            (call, Problem(kernel=call.kernel, signature=max(call.signatures, key=_volume), target=p.target))
            for call in p.kernel.calls((p.signature,))
            if call.free(Config(dict.fromkeys(call.kernel.declaration.keys, 0)))
        ]

    def of_parts(self, parts: Sequence[tuple[Any, Problem]]) -> Tuned:
        """Searches each part by itself, and estimates the whole for the best of each."""
        default = self._default()
        best: dict[str, Any] = dict(default or {})
        found = []
        for place, (call, part) in enumerate(parts):
            left = None if self.deadline is None else (self.deadline - time.monotonic()) / (len(parts) - place)
            until = None if left is None else time.monotonic() + max(left, 0.0)
            tuned = self.tuner.part(part, self.configs, until)
            found.append(tuned)
            best.update(call.free(tuned.config))
        whole = [default, Config(best), self.problem.kernel.default_config(self.problem.signature, self.problem.target)]
        configs = list(dict.fromkeys(config for config in whole if config is not None))
        self.state.total = len(configs)
        self._try(configs)
        self.space = sum(tuned.space for tuned in found)
        self.stopped = "budget" if any(tuned.stopped == "budget" for tuned in found) else ""
        result = self._winner(default)
        failures = collections.Counter(result.failures)
        for tuned in found:
            failures.update(tuned.failures)
        return dataclasses.replace(result, tried=result.tried + sum(t.tried for t in found), failures=dict(failures))

    # --- the result

    def _winner(self, default: Config | None) -> Tuned:
        p = self.problem
        good = [trial for trial in self.trials.values() if trial.us is not None]
        if not good:
            raise self._nothing("every config fails")
        first = self.trials.get(default) if default is not None else None
        source = first.source if first is not None and first.us is not None else _best_source(good)
        if source == estimating.ROOFLINE:
            reasons = list(dict.fromkeys(trial.reason for trial in good if trial.reason))
            raise TuneError(
                p.kernel.name,
                f"no schedule can be replayed ({'; '.join(reasons[:2]) or 'no reason given'})",
                "one: a roofline is the same for most configs and tells nothing about them",
                "Measure on a TPU with --device, or install the libtpu that the replay knows.",
                target=p.target.name,
            )
        ranked = sorted((t for t in good if t.source == source), key=lambda t: t.us or 0.0)
        how = ""
        for trial in ranked[:_CHECKED]:
            wrong, how = verifying.check(p.kernel, p.signature, trial.config)
            if not wrong:
                return self._tuned(trial, default, first, how)
            self.trials[trial.config] = dataclasses.replace(trial, us=None, failure="numerics", reason=wrong)
        raise self._nothing(f"the best {min(_CHECKED, len(ranked))} configs give wrong results ({how})")

    def _nothing(self, what: str) -> TuneError:
        reasons: collections.Counter[str] = collections.Counter()
        example: dict[str, str] = {}
        for trial in self.trials.values():
            if trial.us is None:
                reasons[trial.failure] += 1
                example.setdefault(trial.failure, trial.reason)
        shown = "; ".join(f"{count} x {kind}, such as: {example[kind].rstrip('.')}" for kind, count in reasons.most_common())
        return TuneError(
            self.problem.kernel.name,
            f"{what} of the {len(self.trials)} tried at {self.problem.signature}: {shown}",
            "one that can be used",
            target=self.problem.target.name,
        )

    def _tuned(self, best: Trial, default: Config | None, first: Trial | None, how: str) -> Tuned:
        p = self.problem
        return Tuned(
            kernel=p.kernel.name,
            direction=p.direction,
            workload=p.workload,
            target=p.target.name,
            sizes=dict(p.signature.sizes),
            config=best.config,
            us=best.us or 0.0,
            source=best.source,
            default_config=default or Config(),
            default_us=None if first is None else first.us,
            trials=tuple(self.trials.values()),
            space=self.space,
            tried=len(self.trials),
            failures=dict(collections.Counter(t.failure for t in self.trials.values() if t.us is None)),
            verified=how,
            stopped=self.stopped,
            seconds=time.monotonic() - self.began,
        )


def _best_source(good: Iterable[Trial]) -> str:
    return max((trial.source for trial in good), key=recording.SOURCES.index)


def _volume(signature: Signature) -> int:
    total = 1
    for size in signature.sizes.values():
        total *= max(size, 1)
    return total


def _failed(config: Config, error: TpukernError) -> Trial:
    text = str(error)
    kind = next((kind for mark, kind in _KINDS if mark in text), "compiler" if error.stage == "compile" else "lowering")
    return Trial(config=config, failure=kind, reason=text)


def _trial(config: Config, found: Any) -> Trial:
    if isinstance(found, Trial):
        return found
    if isinstance(found, TpukernError):
        return _failed(config, found)
    reason = found.gaps[0] if found.source == estimating.ROOFLINE and found.gaps else ""
    return Trial(
        config=config, us=found.us, source=found.source, reason=reason, vmem_bytes=found.vmem_bytes, samples=(found.us,)
    )


def trial_key(job: Job) -> str | None:
    """Returns a digest of all that a trial depends on; None if it cannot be kept."""
    key = estimating.key_of(job)
    return None if key is None else value_names.digest(key)


def _record(problem: Problem, tuned: Tuned) -> Record | None:
    kernel, signature = problem.kernel, problem.signature
    statics = recalling.statics_of(kernel.declaration, signature.statics)
    if statics is None:
        return None
    best = next(trial for trial in tuned.trials if trial.config == tuned.config)
    bound = kernel.bind_signature(signature, tuned.config, problem.target)
    return Record(
        kernel=kernel.name,
        target=problem.target.name,
        inputs=tuple(o.dtype for o in signature.inputs),
        statics=statics,
        sizes=dict(signature.sizes),
        config=dict(tuned.config),
        us=tuned.us,
        source=tuned.source,
        samples=best.samples or (tuned.us,),
        default_us=tuned.default_us,
        default_config=str(tuned.default_config),
        workload=problem.workload,
        tried=tuned.tried,
        failed=sum(tuned.failures.values()),
        space=tuned.space,
        verified=tuned.verified,
        date=recording.now(),
        versions={"tpukern": __version__, **estimating.versions()},
        digest=kernel.source_digest(),
        code=lowering.lower(bound, problem.target).digest,
    )


def tune(
    kernel: Kernel,
    *args: Any,
    target: Target | str,
    workload: str | None = None,
    direction: str = "forward",
    budget: int | str | Budget | None = None,
    strategy: str = "auto",
    workers: int | None = None,
    timeout_s: float | None = None,
    memory_bytes: int | None = None,
    record: bool = True,
    fresh: bool = False,
    watch: Watch | None = None,
    **statics: Any,
) -> Tuned:
    """Finds the best config of a kernel for a chip, without one, checks its results and puts it on record.

    The record is what calls without a config then use on that chip: see `docs/tune.md`. Trials are kept, so a search that was
    interrupted goes on where it was.

    Args:
        kernel: The kernel.
        args: Its inputs: arrays, or anything with a shape and a dtype; or one signature. None if a workload is named.
        target: The chip.
        workload: Name of one of the kernel's workloads.
        direction: "forward" or "backward".
        budget: How much may be tried: a number of configs, or a time such as "10m"; None for the whole of a small space, and
            64 configs of a larger one.
        strategy: "auto", "exhaustive" or "optuna"; "auto" tries all of up to 64 configs and leaves more to Optuna.
        workers: How many configs compile at once; None for one a core.
        timeout_s: How long one compile may take; None for 120 s.
        memory_bytes: How much memory a compile worker may hold.
        record: Whether the result goes on record.
        fresh: Whether earlier trials are done again.
        watch: Called with the state of the search after each trial.
        statics: Static arguments.

    Returns:
        The best config, its time and the default's, and every trial.

    Raises:
        ConfigError: No such target, workload, direction, strategy or budget.
        SignatureError: The inputs do not fit.
        TuneError: The space is empty, every config fails or gives wrong results, or no schedule can be followed.
        CompileError: libtpu is not installed, or no worker process starts.
    """
    chip = target_named(target) if isinstance(target, str) else target
    limits = Budget.parse(budget)
    problem = problem_of(kernel, args, chip, workload, direction, statics)
    with Tuner(
        workers=workers, timeout_s=timeout_s, memory_bytes=memory_bytes, strategy=strategy, record=record, fresh=fresh,
        watch=watch,
    ) as tuner:  # fmt: skip
        return tuner.tune(problem, limits)


def problem_of(
    kernel: Kernel, args: Sequence[Any], target: Target, workload: str | None, direction: str, statics: Mapping[str, Any]
) -> Problem:
    """Returns what a call of `tune` is about.

    Raises:
        ConfigError: No such workload or direction.
        SignatureError: The inputs do not fit.
    """
    if workload is not None:
        bound = estimating.of_workload(kernel, workload, direction, {}, target)
        return Problem(kernel=bound.kernel, signature=bound.signature, target=target, workload=workload)
    if direction not in kernel.directions:
        raise ConfigError(kernel.name, f"no direction {direction!r}", f"one of {list(kernel.directions)}")
    given = args[0] if len(args) == 1 and isinstance(args[0], Signature) else kernel.signature(*args, **statics)
    if direction == "backward" and given.kernel == kernel.name:
        given = kernel.gradient_signature(given)
    return Problem(kernel=kernel.directions[direction], signature=given, target=target)
