"""Kernels made ready to run: forward and backward pass in one program, with the chip's arithmetic written out."""

import contextlib
import dataclasses
import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.extend import core

from tpukern import environment
from tpukern.dsl import Kernel, Operand, Signature, using
from tpukern.errors import ParityError
from tpukern.targets import Target
from tpukern.testing import arithmetic
from tpukern.testing.reference import Arrays
from tpukern.testing.strategies import Case, Point
from tpukern.testing.values import dtype_named

# Programs run some dozen times, on small arrays: compiling them is what costs. Level 0 is faster still, and wrong: jaxlib
# 0.10.2 doubled one row of a bfloat16 product.
_WORKERS: Final = 2
_OPTIONS: Final[Any] = {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a program computes.

    Attributes:
        kernel: The forward kernel.
        point: Shapes and configs.
        signature: The forward call's.
        backward: The gradient call's; None if there is no gradient, or it is not wanted.
    """

    kernel: Kernel
    point: Point
    signature: Signature
    backward: Signature | None

    @property
    def cotangents(self) -> tuple[str, ...]:
        """Names of the outputs that have a cotangent."""
        return tuple(o.name for o in self.signature.outputs if o.name not in self.signature.saved)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the results: outputs, then gradients."""
        gradients = () if self.backward is None else tuple(o.name for o in self.backward.outputs)
        return (*(o.name for o in self.signature.outputs), *gradients)

    @property
    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the operands: inputs, then cotangents."""
        wanted = [o for o in self.signature.outputs if o.name in self.cotangents] if self.backward is not None else []
        return [jax.ShapeDtypeStruct(o.shape, jnp.dtype(o.dtype)) for o in (*self.signature.inputs, *wanted)]

    @property
    def handed_on(self) -> tuple[Operand, ...]:
        """The outputs that the gradient takes."""
        taken = () if self.backward is None else tuple(o.name for o in self.backward.inputs)
        return tuple(o for o in self.signature.outputs if o.name in taken)

    def function(self, *, nudged: bool = False) -> Callable[..., tuple[Any, ...]]:
        """Returns the JAX function from operands to results.

        Args:
            nudged: It takes further operands, one for each of `handed_on`: what the gradient gets is multiplied by them.

        Raises:
            TpukernError: The kernel refuses the call.
        """
        forward = self.kernel.bind_signature(self.signature, self.point.forward)
        gradient = self.kernel.gradient
        backward = None
        if self.backward is not None and gradient is not None:
            backward = gradient.bind_signature(self.backward, self.point.backward)

        def both(*operands: Any) -> tuple[Any, ...]:
            with using(interpret=True):
                count = len(self.specs)
                nudges = dict(zip((o.name for o in self.handed_on), operands[count:], strict=True)) if nudged else {}
                inputs, operands = operands[: len(self.signature.inputs)], operands[:count]
                outputs = forward.function(*inputs)
                if backward is None:
                    return tuple(outputs)
                named = {o.name: a for o, a in zip(self.signature.inputs, inputs, strict=True)}
                named |= {o.name: a for o, a in zip(self.signature.outputs, outputs, strict=True)}
                named |= {name: (named[name] * nudge).astype(named[name].dtype) for name, nudge in nudges.items()}
                named |= {f"d{name}": a for name, a in zip(self.cotangents, operands[len(inputs) :], strict=True)}
                return (*outputs, *backward.function(*(named[o.name] for o in backward.signature.inputs)))

        return both

    def operands(self, case: Case) -> list[np.ndarray]:
        """Returns the arrays that a case stands for."""
        given = case.cotangents(self.kernel) if self.backward is not None else {}
        return [*case.inputs(self.kernel), *given.values()]


def plan(kernel: Kernel, point: Point, *, gradient: bool = True) -> Plan:
    """Plans a program of both directions, or of the forward pass alone.

    Raises:
        SignatureError: The kernel refuses the shapes.
    """
    signature = point.signature(kernel)
    backward = kernel.gradient_signature(signature) if gradient and kernel.gradient is not None else None
    return Plan(kernel=kernel, point=point, signature=signature, backward=backward)


class Program:
    """A plan, compiled for the CPU.

    Args:
        plan: What to compute.
        chip: Whose arithmetic to apply; None for the CPU's own.
        timeout: Seconds that the first run may take.
        optimised: Compile as JAX does, not for fast compiling.

    Raises:
        TpukernError: The kernel refuses the call, or Mosaic would refuse the precision of a dot.
    """

    def __init__(self, plan: Plan, chip: Target | None, *, timeout: float = 60.0, optimised: bool = False) -> None:
        self.plan, self.timeout, self._ran = plan, timeout, False
        self._still = [np.ones(o.shape, np.float32) for o in plan.handed_on]
        specs = [*plan.specs, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self._still)]
        closed = jax.make_jaxpr(plan.function(nudged=True))(*specs)
        if chip is not None:
            closed = arithmetic.rounded(closed, chip)
        self._compiled = (
            jax.jit(core.jaxpr_as_fun(closed)).lower(*specs).compile(compiler_options=None if optimised else _OPTIONS)
        )

    def run(self, operands: Sequence[np.ndarray], seed: int | None = None) -> Arrays:
        """Runs it.

        Args:
            operands: Inputs, then cotangents.
            seed: If given, what the gradient gets of the outputs moves by one eps, up or down at random.

        Raises:
            ParityError: It does not end.
        """
        nudges = self._still if seed is None else self._nudges(np.random.default_rng(seed))
        if self._ran:
            return self._results([*operands, *nudges])
        results = within(self.timeout, lambda: self._results([*operands, *nudges]))
        if results is None:
            found = f"it still runs after {self.timeout:g} s, on {self.plan.point}"
            raise ParityError(self.plan.kernel.name, found, "a kernel that ends")
        self._ran = True
        return results

    def _nudges(self, rng: np.random.Generator) -> list[np.ndarray]:
        found = []
        for o in self.plan.handed_on:
            step = float(ml_dtypes.finfo(dtype_named(o.dtype)).eps)
            found.append((1 + step * rng.choice((-1.0, 1.0), o.shape)).astype(np.float32))
        return found

    def _results(self, operands: Sequence[np.ndarray]) -> Arrays:
        results = jax.block_until_ready(self._compiled(*operands))
        return {name: np.asarray(a) for name, a in zip(self.plan.names, results, strict=True)}


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """Returns what `work` returns; None if that takes too long (it is left to itself then)."""
    box: dict[str, Any] = {}

    def run() -> None:
        try:
            box["result"] = work()
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=run, daemon=True, name="tpukern-verify")
    thread.start()
    thread.join(seconds)
    if "error" in box:
        raise box["error"]
    return box.get("result")


class Programs:
    """The programs of one verdict, each compiled once.

    Args:
        kernel: The forward kernel.
        chip: Whose arithmetic to apply.
        gradient: Whether the backward pass is wanted.
        timeout: Seconds that a first run may take.
    """

    def __init__(self, kernel: Kernel, chip: Target | None, *, gradient: bool = True, timeout: float = 60.0) -> None:
        self.kernel, self.chip, self.gradient, self.timeout = kernel, chip, gradient, timeout
        self._made: dict[Point, Future[Program]] = {}
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="tpukern-compile")

    def __getitem__(self, point: Point) -> Program:
        self.prepare([point])
        return self._made[point].result()

    def prepare(self, points: Iterable[Point]) -> None:
        """Begins to compile in the background."""
        for point in points:
            if point not in self._made:
                self._made[point] = self._workers.submit(self._program, point)

    def close(self) -> None:
        """Drops what has not begun to compile."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _program(self, point: Point) -> Program:
        return Program(plan(self.kernel, point, gradient=self.gradient), self.chip, timeout=self.timeout)


@contextlib.contextmanager
def one_torch_thread() -> Any:
    """Keeps torch to one thread: beside XLA's threads more of them are slower, by far."""
    if "torch" not in sys.modules:  # who imported it has decided whether torch_tpu comes with it; a verdict needs no device
        name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
        with environment.changed({name: environment.value(name) or "0"}):
            importlib.import_module("torch")
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def named_operands(plan: Plan, operands: Sequence[np.ndarray]) -> Mapping[str, np.ndarray]:
    """Returns operands by name: inputs, and cotangents as `d<out>`."""
    names = [*(o.name for o in plan.signature.inputs), *(f"d{name}" for name in plan.cotangents)]
    return dict(zip(names, operands, strict=False))
