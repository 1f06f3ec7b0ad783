"""What the TPU's memory does, on a CPU: kernels under Pallas' TPU interpreter.

A program runs twice. First with uninitialised memory full of NaN (the largest value, for integers), DMAs carried out when
they are started, and the race detector on. The second run exists because NaN that is read may be masked away again, and
because a DMA that happens to land early hides a missing wait: it has memory full of zeros, DMAs carried out as late as
their waits allow, and parallel grid steps in another order. It is left out if it could not differ. Results that differ are
a fault; runs that change one of the three at a time then say which one it is.

A run that hangs is ended, not abandoned: a wait that nothing can end any more is recognised as such within a second; the
time-out is for loops. The interpreter asks at every access, every round of a loop and every grid step whether to go on.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
from jax.experimental import io_callback
from jax.experimental.pallas import tpu as pltpu
from jax.extend import core

from tpukern import jax_adapter
from tpukern.errors import DeviceError, LowerError
from tpukern.targets import Target
from tpukern.testing import jaxprs
from tpukern.testing.watching import Call, Finding, Watch, describe, poisoned

__all__ = ["Finding", "Report", "Simulated", "simulate", "simulated_devices"]

_GRACE_S = 30.0  # for a stopped run to end
_POLL_S = 0.05
_STUCK_POLLS = 6
_ONE_AT_A_TIME = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What one program did.

    Attributes:
        findings: The faults; empty for a clean program.
        outputs: The program's results in the first run; None if it did not end.
        steps: Grid steps run.
        seconds: Wall time, with compilation.
    """

    findings: tuple[Finding, ...]
    outputs: Any
    steps: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Variant:
    memory: Literal["nan", "zero"] = "nan"
    dma: Literal["eager", "on_wait"] = "eager"
    shuffled: bool = False


_LATE = _Variant(memory="zero", dma="on_wait", shuffled=True)
_SINGLE = (
    (_Variant(memory="zero"), "uninitialised", "depends on what uninitialised memory holds"),
    (_Variant(dma="on_wait"), "race", "depends on when DMAs land: a wait is missing, or comes after the use"),
    (_Variant(shuffled=True), "order", "depends on the order of the grid's parallel steps"),
)


def simulate(function: Callable[..., Any] | core.ClosedJaxpr, *args: Any, timeout: float = 60.0, **options: Any) -> Report:
    """Runs a program once under the TPU interpreter; see `Simulated` for the options."""
    return Simulated(function, *args, **options).run(*args, timeout=timeout)


class Simulated:
    """A program prepared for the TPU interpreter, to be run on several inputs of one shape.

    Args:
        function: A JAX callable, or a traced program. Its `pallas_call`s may be in any form.
        args: Arrays or `jax.ShapeDtypeStruct`s.
        cores: TensorCores of each simulated device; parallel grid dims are spread over them. More than one is slow.
        races: False leaves the race detector out.
        bounds: "logical", or "padded": reads of the padding that the chip's tiles add are then allowed (needs a target).
        target: The chip to trace for, if the kernels ask for it.
    """

    def __init__(
        self,
        function: Callable[..., Any] | core.ClosedJaxpr,
        *args: Any,
        cores: int = 1,
        races: bool = True,
        bounds: Literal["logical", "padded"] = "logical",
        target: Target | None = None,
    ) -> None:
        self.cores, self.races, self.target = cores, races, target
        self.bounds: Literal["logical", "padded"] = bounds
        with self._context():
            self._closed, self._tree = jaxprs.traced(function, args)
        kernels = [e for e in jaxprs.equations(self._closed.jaxpr) if e.primitive.name == "pallas_call"]
        self._calls = tuple(describe(e, jax_adapter.source_line) for e in kernels)
        self._orders = any(_has_order(e) for e in kernels)
        self._late = any(_can_be_late(e.params["jaxpr"]) for e in kernels)
        self._compiled: dict[_Variant, Any] = {}
        self._watch: Watch | None = None

    def run(self, *args: Any, timeout: float = 60.0) -> Report:
        """Runs the program on one set of inputs.

        Args:
            args: Arrays of the shapes it was prepared for.
            timeout: Seconds that one run may take, compilation not counted.

        Raises:
            LowerError: The interpreter does not know an operation of a kernel.
        """
        began = time.monotonic()
        leaves = [np.asarray(a) if not isinstance(a, jax.Array) else a for a in jax.tree.leaves(args)]
        first, watch = self._variant(_Variant(), leaves, timeout)
        findings, steps = list(watch.findings), watch.steps
        if not findings and (self._orders or self._late or watch.poison or _any_poison(first)):
            late, second = self._variant(_LATE, leaves, timeout)
            findings, steps = list(second.findings), steps + second.steps
            if not findings and (where := _difference(first, late)):
                findings, more = self._explain(first, leaves, timeout, where, watch)
                steps += more
        outputs = None
        if first is not None:
            outputs = tuple(first) if self._tree is None else jax.tree.unflatten(self._tree, first)
        return Report(findings=tuple(findings), outputs=outputs, steps=steps, seconds=time.monotonic() - began)

    def _explain(
        self, first: Any, leaves: Sequence[Any], timeout: float, where: str, watch: Watch
    ) -> tuple[list[Finding], int]:
        """Says which of the three conditions a result depends on."""
        findings, steps = [], 0
        names = ", ".join(dict.fromkeys(c.name for c in self._calls))
        for variant, kind, text in _SINGLE:
            result, other = self._variant(variant, leaves, timeout)
            steps += other.steps
            found = other.findings[:1]
            if not found and (at := _difference(first, result)):
                poison = watch.poison if kind == "uninitialised" else None
                found = [
                    Finding(
                        kind=kind,
                        kernel=poison.kernel if poison else names,
                        what=f"{at} {text}" + (f"; {poison.what}" if poison else ""),
                        grid_step=poison.grid_step if poison else None,
                        source=poison.source if poison else None,
                    )
                ]
            findings += found
        if not findings:
            findings = [Finding(kind="race", kernel=names, what=f"{where} differs between runs")]
        return findings, steps

    def _variant(self, variant: _Variant, leaves: Sequence[Any], timeout: float) -> tuple[Any, Watch]:
        """Runs one variant. Returns its results (None if it failed) and what was seen."""
        with _ONE_AT_A_TIME:
            if variant not in self._compiled:
                self._compiled[variant] = self._compile(variant, leaves)
            self._watch = watch = Watch(self.cores)
            with jax_adapter.watched_interpreter(watch):
                return _run(self._compiled[variant], leaves, watch, timeout), watch

    def _compile(self, variant: _Variant, leaves: Sequence[Any]) -> Any:
        program = jaxprs.rewrite(self._closed, lambda eqn, place: self._rule(eqn, place, variant))
        try:
            with self._context():
                return jax.jit(core.jaxpr_as_fun(program)).lower(*leaves).compile()
        except (NotImplementedError, ValueError, KeyError) as error:
            name = self._calls[0].name if self._calls else "program"
            raise LowerError(
                name, f"the TPU interpreter refuses it: {error}", do="Leave the semantics check out for it."
            ) from error

    def _rule(self, eqn: jaxprs.Eqn, place: jaxprs.Place, variant: _Variant) -> jaxprs.Eqn | None:
        name = eqn.primitive.name
        if name == "pallas_call":
            call, params = self._calls[place.call], _prefix_parallel(eqn.params["compiler_params"])
            interpret = pltpu.InterpretParams(
                detect_races=self.races,
                uninitialized_memory=variant.memory,
                dma_execution_mode=variant.dma,
                out_of_bounds_reads="raise",
                buffer_bounds=self.bounds,
                num_cores_or_threads=self.cores,
                random_seed=_other_seed(eqn, params) if variant.shuffled else 0,
                grid_point_recorder=self._recorder(call),
            )
            effects = eqn.effects | jax_adapter.interpreter_effects(interpret)
            return eqn.replace(params={**eqn.params, "interpret": interpret, "compiler_params": params}, effects=effects)
        if place.kernel is not None and name in ("while", "scan"):
            body = "body_jaxpr" if name == "while" else "jaxpr"
            beating = self._beating(eqn.params[body])
            return eqn.replace(params={**eqn.params, body: beating}, effects=eqn.effects | beating.effects)
        return None

    def _recorder(self, call: Call) -> Callable[[Any, Any, Any], Any]:
        def record(token: Any, point: Any, core_index: Any) -> Any:
            assert self._watch is not None
            self._watch.step(call, point, core_index)
            return token

        return record

    def _beating(self, closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
        """Makes a loop's body ask whether to go on."""

        def beat() -> None:
            assert self._watch is not None
            self._watch.beat()

        (call,) = jax.make_jaxpr(lambda: io_callback(beat, None))().jaxpr.eqns
        body = closed.jaxpr
        return core.ClosedJaxpr(body.replace(eqns=[call, *body.eqns], effects=body.effects | call.effects), closed.consts)

    def _context(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.target is None else jax_adapter.device_context(self.target)


def simulated_devices(count: int) -> list[Any]:
    """Returns CPU devices to lay a mesh of simulated TPUs over, for kernels that talk to each other.

    Raises:
        DeviceError: JAX was started with fewer.
    """
    backend_up_before = True
    with contextlib.suppress(RuntimeError):  # too late: the backend is up
        jax.config.update("jax_num_cpu_devices", count)
        backend_up_before = False
    devices = jax.devices("cpu")
    if len(devices) < count:
        do = "Ask for the devices before JAX runs anything." if backend_up_before else "Unset XLA_FLAGS."
        raise DeviceError("semantics", f"{len(devices)} CPU devices", f"{count} to simulate {count} TPUs", do)
    return list(devices[:count])


def _run(compiled: Any, leaves: Sequence[Any], watch: Watch, timeout: float) -> Any:
    """Runs a compiled program in a thread, and ends it if it hangs."""
    box: dict[str, Any] = {}

    def work() -> None:
        try:
            box["results"] = [np.asarray(r) for r in jax.block_until_ready(compiled(*leaves))]
        except Exception as error:  # the watch knows it already; this is XLA's rendering of it
            box["error"] = error

    worker = threading.Thread(target=work, daemon=True, name="tpukern-semantics")
    worker.start()
    deadline, stuck = time.monotonic() + timeout, 0
    while worker.is_alive():
        worker.join(_POLL_S)
        stuck = stuck + 1 if watch.blocked() else 0
        if stuck >= _STUCK_POLLS:
            watch.stop("every core waits for what nothing is left to give")
        elif time.monotonic() > deadline:
            watch.stop(f"still running after {timeout:g} s")
        else:
            continue
        worker.join(_GRACE_S)
        break
    if "error" in box and not watch.findings:
        raise box["error"]
    return None if watch.hung else box.get("results")


def _prefix_parallel(params: Any) -> Any:
    """Makes parallel dims behind an arbitrary one arbitrary: the interpreter knows no others (jax 0.10.2), the chip does."""
    semantics = getattr(params, "dimension_semantics", None)
    if not semantics:
        return params
    texts = [str(getattr(s, "value", s)).lower() for s in semantics]
    first = next((i for i, s in enumerate(texts) if s != "parallel"), len(texts))
    changed = tuple("arbitrary" if i > first and texts[i] == "parallel" else s for i, s in enumerate(semantics))
    return dataclasses.replace(params, dimension_semantics=changed)


def _parallel_dims(eqn: jaxprs.Eqn) -> list[int]:
    """Returns the sizes of the parallel dims whose order can be changed."""
    params, grid = _prefix_parallel(eqn.params["compiler_params"]), eqn.params["grid_mapping"].grid
    semantics = getattr(params, "dimension_semantics", None) or ()
    texts = [str(getattr(s, "value", s)).lower() for s in semantics]
    return [n for n, s in zip(grid, texts, strict=False) if s == "parallel" and isinstance(n, int) and n > 1]


def _has_order(eqn: jaxprs.Eqn) -> bool:
    return bool(_parallel_dims(eqn))


def _other_seed(eqn: jaxprs.Eqn, params: Any) -> int:
    """Returns a seed that visits the parallel dims in another order than seed 0."""
    if not _parallel_dims(eqn):
        return 0
    grid = eqn.params["grid_mapping"].grid
    usual = jax_adapter.parallel_order(grid, params, 0)
    for seed in range(1, 16):
        if jax_adapter.parallel_order(grid, params, seed) != usual:
            return seed
    return 1


def _can_be_late(jaxpr: Any) -> bool:
    """Whether a kernel starts DMAs, or uses what a store returns (a read that the interpreter does not report)."""
    used = {id(v) for e in jaxpr.eqns for v in e.invars} | {id(v) for v in jaxpr.outvars}
    for e in jaxpr.eqns:
        if e.primitive.name == "dma_start" or (e.primitive.name in ("swap", "masked_swap") and id(e.outvars[0]) in used):
            return True
    return any(_can_be_late(inner) for e in jaxpr.eqns for inner in jaxprs.inside(e))


def _any_poison(results: Any) -> bool:
    return results is None or any(poisoned(r) for r in results)


def _difference(first: Any, second: Any) -> str:
    """Returns where two runs differ by more than rounding; empty if they agree."""
    if first is None or second is None:
        return ""
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        same = a == b
        if not np.issubdtype(a.dtype, np.integer) and a.dtype != np.bool_:
            wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
            with np.errstate(all="ignore"):
                close = np.abs(wide_a - wide_b) <= 8 * float(ml_dtypes.finfo(a.dtype).eps) * np.abs(wide_a)
            same = same | close | (np.isnan(wide_a) & np.isnan(wide_b))
        wrong = np.argwhere(~np.asarray(same))
        if len(wrong):
            return f"output {i}, {len(wrong)} of {a.size} elements from {tuple(int(k) for k in wrong[0])} on,"
    return ""
