"""Launching a kernel on torch tensors, below autograd: prepared once per shapes, dtypes, statics and config, then looked up."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from tpukern.errors import SignatureError
from tpukern.registry import REGISTRY
from tpukern.running import Layouts, Prepared, Request, prepare

if TYPE_CHECKING:
    from tpukern.dsl import Kernel

MOST_PLANS: Final = 4096  # of one kernel; then those seen first are forgotten, their counts kept


class Caller(threading.local):
    """Whose call this thread serves.

    Attributes:
        op: The override's or op's name under which `tpukern.explain` files a launch.
        launches: Where launches are noted, while an override learns what its `impl` does.
    """

    def __init__(self) -> None:
        self.op: str | None = None
        self.launches: list[Launch] | None = None


CALLER: Final = Caller()


class Plan:
    """One way of calling a kernel, ready to run.

    Attributes:
        run: Tensors to what the launch returns.
        prepared: The rest of what is known of it.
        op: Whose calls it serves.
    """

    __slots__ = ("op", "prepared", "run")

    def __init__(self, prepared: Prepared, op: str) -> None:
        self.run, self.prepared, self.op = prepared.run, prepared, op

    @property
    def calls(self) -> int:
        """How often it ran."""
        return self.prepared.tally.calls

    @property
    def row(self) -> tuple[str, str, str, str, str]:
        return self.op, self.prepared.device, self.prepared.config, self.prepared.origin, self.prepared.reason


class Launch(NamedTuple):
    """A launch, noted."""

    plan: Plan
    tensors: Sequence[torch.Tensor]
    outputs: Any
    layouts: bool
    check_devices: Callable[[Sequence[Any]], None]


@functools.cache
def _traits(count: int) -> Callable[..., tuple[Any, ...]]:
    """Returns a function of `count` tensors to their shapes and dtypes: written out, it takes half the time of a loop."""
    names = [f"t{index}" for index in range(count)]
    parts = ", ".join(f"{name}.shape, {name}.dtype" for name in names)
    function: Callable[..., tuple[Any, ...]] = eval(f"lambda {', '.join(names)}: ({parts},)" if names else "lambda: ()")
    return function


class Launcher:
    """Runs one kernel on the tensors of one kind of device.

    Attributes:
        kernel: The kernel.
        on_cpu: Whether it serves CPU tensors (else those of the ``tpu`` device).
        plans: By everything that a plan depends on.
    """

    def __init__(self, kernel: "Kernel", *, on_cpu: bool) -> None:
        self.kernel, self.on_cpu = kernel, on_cpu
        self.plans: dict[Any, Plan] = {}
        self.forgotten: dict[tuple[str, str, str, str, str], int] = {}
        self._lock = threading.Lock()
        self._traits = _traits(len(kernel.declaration.inputs))

    def launch(self, tensors: Sequence[torch.Tensor], keywords: Mapping[str, Any], layouts: Layouts | None = None) -> Any:
        """Runs the kernel.

        Args:
            tensors: The inputs, in order.
            keywords: Static arguments, config keys, and `config`, the text of a config.
            layouts: For outputs by name, the physical order of their axes, outermost first.

        Returns:
            The output; several as a tuple.

        Raises:
            SignatureError: Rank, size, dtype or device do not fit.
            ConfigError: A keyword is unknown or a config not legal.
        """
        key: tuple[Any, ...] = ()
        try:
            key = (CALLER.op, *self._traits(*tensors), *keywords.items())
            if layouts is not None:
                key = (*key, *layouts.items())
            plan = self.plans.get(key)
        except (TypeError, AttributeError):  # a number of inputs, a kind of input or a keyword that preparing explains
            key, plan = (), None
        if plan is None:
            if self._belongs_to_cpu(tensors):
                return launcher(self.kernel, on_cpu=True).launch(tensors, keywords, layouts)
            plan = self._prepare(key, tensors, keywords, layouts)
        try:
            outputs = plan.run(tensors)
        except RuntimeError:  # where torch_tpu says that an operand is not on its device: cheaper than asking each time
            plan.prepared.tally.calls -= 1
            if self._belongs_to_cpu(tensors):
                return launcher(self.kernel, on_cpu=True).launch(tensors, keywords, layouts)
            self.check_devices(tensors)
            raise
        if CALLER.launches is not None:
            CALLER.launches.append(Launch(plan, tensors, outputs, bool(layouts), self.check_devices))
        return outputs

    def _belongs_to_cpu(self, tensors: Sequence[Any]) -> bool:
        return (
            not self.on_cpu and bool(tensors) and all(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in tensors)
        )

    def counts(self) -> dict[tuple[str, str, str, str, str], int]:
        """Returns how often each (op, device, config, origin, reason) was called."""
        with self._lock:
            found = dict(self.forgotten)
            for plan in self.plans.values():
                if plan.calls:
                    found[plan.row] = found.get(plan.row, 0) + plan.calls
        return found

    def reset(self) -> None:
        """Sets the counts to zero."""
        with self._lock:
            self.forgotten.clear()
            for plan in self.plans.values():
                plan.prepared.tally.calls = 0

    def _prepare(
        self, key: tuple[Any, ...], tensors: Sequence[Any], keywords: Mapping[str, Any], layouts: Layouts | None
    ) -> Plan:
        self.check_devices(tensors)
        request = Request.read(self.kernel, tensors, keywords, layouts or {})
        plan = Plan(prepare(request, on_cpu=self.on_cpu), CALLER.op or self.kernel.op or self.kernel.name)
        if key:
            with self._lock:
                if len(self.plans) >= MOST_PLANS:
                    self._forget()
                self.plans[key] = plan
        return plan

    def _forget(self) -> None:
        for key in list(self.plans)[: MOST_PLANS // 4]:
            plan = self.plans.pop(key)
            if plan.calls:
                self.forgotten[plan.row] = self.forgotten.get(plan.row, 0) + plan.calls

    def check_devices(self, tensors: Sequence[Any]) -> None:
        """Raises SignatureError if not all of them are tensors on this launcher's device."""
        k = self.kernel.declaration
        given = list(zip(k.inputs, tensors, strict=False))
        for o, tensor in given:
            if not isinstance(tensor, torch.Tensor):
                raise SignatureError(k.kernel, f"{o.name} is a {type(tensor).__name__}", "a tensor")
        wanted = "cpu" if self.on_cpu else "tpu"
        for o, tensor in given:
            if tensor.device.type != wanted:
                found = f"{o.name} is on {tensor.device.type}, other operands on {wanted}"
                raise SignatureError(k.kernel, found, "all operands on one device")


def launcher(kernel: "Kernel", *, on_cpu: bool = False) -> Launcher:
    """Returns the launcher of a kernel for the ``tpu`` device or for CPU tensors."""
    found = REGISTRY.launchers.get((kernel, on_cpu))
    if found is None:
        found = REGISTRY.launchers.setdefault((kernel, on_cpu), Launcher(kernel, on_cpu=on_cpu))
    return found
