"""Running a kernel on torch tensors, below autograd: prepared once per shapes, dtypes, statics and config, then looked up.

On the ``tpu`` device a kernel is exported once and handed to torch_tpu; on CPU tensors its interpret form is compiled by JAX
and shares memory with torch. A call that has been seen costs one dictionary look-up here.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from tpukern import device, jax_adapter, lowering, torch_tpu_adapter
from tpukern.errors import LowerError, SignatureError, TpukernError
from tpukern.registry import REGISTRY
from tpukern.targets import Target

if TYPE_CHECKING:
    from tpukern.dsl import Bound, Config, Kernel, Signature

Layouts = Mapping[str, tuple[int, ...]]
Run = Callable[[Sequence[torch.Tensor]], Any]

MOST_PLANS: Final = 4096  # of one kernel; then those seen first are forgotten, their counts kept

_OF_64_BITS: Final = ("int64", "uint64", "float64")


class Caller:
    """Whose call is being served: the override's or op's name under which `tpukern.explain` files a launch."""

    __slots__ = ("op",)

    def __init__(self) -> None:
        self.op: str | None = None


CALLER: Final = Caller()


class Plan:
    """One way of calling a kernel, ready to run.

    Attributes:
        run: Tensors to what the launch returns.
        op: Whose calls it serves.
        device: "tpu", "emulated" or "cpu".
        config: The config's text; empty where no kernel runs.
        reason: Why no kernel runs, if none does.
        calls: How often it ran.
    """

    __slots__ = ("calls", "config", "device", "op", "reason", "run")

    def __init__(self, *, run: Run, op: str, device: str, config: str, reason: str) -> None:
        self.run, self.op, self.device, self.config, self.reason, self.calls = run, op, device, config, reason, 0

    @property
    def row(self) -> tuple[str, str, str, str]:
        return self.op, self.device, self.config, self.reason


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
        self.forgotten: dict[tuple[str, str, str, str], int] = {}
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
        try:
            key = (CALLER.op, *self._traits(*tensors), *keywords.items())
            if layouts is not None:
                key += (*layouts.items(),)
            plan = self.plans.get(key)
        except (TypeError, AttributeError):  # a number of inputs, a kind of input or a keyword that preparing explains
            key = plan = None
        if plan is None:
            if self._belongs_to_cpu(tensors):
                return launcher(self.kernel, on_cpu=True).launch(tensors, keywords, layouts)
            plan = self._prepare(key, tensors, keywords, layouts)
        plan.calls += 1
        try:
            return plan.run(tensors)
        except RuntimeError:  # where torch_tpu says that an operand is not on its device: cheaper than asking each time
            plan.calls -= 1
            if self._belongs_to_cpu(tensors):
                return launcher(self.kernel, on_cpu=True).launch(tensors, keywords, layouts)
            self._check_devices(tensors)
            raise

    def _belongs_to_cpu(self, tensors: Sequence[Any]) -> bool:
        return (
            not self.on_cpu and bool(tensors) and all(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in tensors)
        )

    def counts(self) -> dict[tuple[str, str, str, str], int]:
        """Returns how often each (op, device, config, reason) was called."""
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
                plan.calls = 0

    def _prepare(self, key: Any, tensors: Sequence[Any], keywords: Mapping[str, Any], layouts: Layouts | None) -> Plan:
        self._check_devices(tensors)
        request = Request.read(self.kernel, tensors, keywords, layouts or {})
        plan = _plan(request, tensors, self.on_cpu, CALLER.op or self.kernel.op or self.kernel.name)
        if key is not None:
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

    def _check_devices(self, tensors: Sequence[Any]) -> None:
        k = self.kernel.declaration
        wanted = "cpu" if self.on_cpu else "tpu"
        for o, tensor in zip(k.inputs, tensors, strict=False):
            if not isinstance(tensor, torch.Tensor):
                raise SignatureError(k.kernel, f"{o.name} is a {type(tensor).__name__}", "a tensor")
            if tensor.device.type != wanted:
                found = f"{o.name} is on {tensor.device.type}, other operands on {wanted}"
                raise SignatureError(k.kernel, found, "all operands on one device")


def launcher(kernel: "Kernel", *, on_cpu: bool = False) -> Launcher:
    """Returns the launcher of a kernel for the ``tpu`` device or for CPU tensors."""
    found = REGISTRY.launchers.get((kernel, on_cpu))
    if found is None:
        found = REGISTRY.launchers.setdefault((kernel, on_cpu), Launcher(kernel, on_cpu=on_cpu))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A launch, read: what has to run, at which shapes, in which layouts."""

    kernel: "Kernel"
    signature: "Signature"
    config: "Config"
    permutations: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def read(cls, kernel: "Kernel", tensors: Sequence[Any], keywords: Mapping[str, Any], layouts: Layouts) -> "Request":
        from tpukern.dsl import Config

        given = dict(keywords)
        text = given.pop("config", "")
        statics = {name: given.pop(name) for name in list(given) if name in kernel.declaration.statics}
        signature = kernel.signature(*tensors, **statics)
        config = Config({**(Config.parse(text) if isinstance(text, str) else text), **given})
        return cls(kernel=kernel, signature=signature, config=config, permutations=_permutations(signature, layouts))

    @property
    def is_empty(self) -> bool:
        """Whether no output has an element."""
        return all(math.prod(o.shape) == 0 for o in self.signature.outputs)

    def bound(self, target: Target | None) -> "Bound":
        """Returns the kernel bound for a chip, or, without one, in the largest blocks: interpret form pays by the step."""
        from tpukern.dsl import Config

        config = self.config
        if target is None:
            known = self.kernel.declaration.keys
            if not (self.kernel.is_tile and all(key in config for key in known)):
                config = Config({**self.kernel.largest_config(self.signature), **config})
        return self.kernel.bind_signature(self.signature, config, target)


def _permutations(signature: "Signature", layouts: Layouts) -> tuple[tuple[int, ...] | None, ...]:
    names = [o.name for o in signature.outputs]
    for name, order in layouts.items():
        if name not in names:
            raise SignatureError(signature.kernel, f"a layout for {name!r}", f"one of the outputs {names}")
        rank = len(signature.outputs[names.index(name)].shape)
        if sorted(order) != list(range(rank)):
            raise SignatureError(signature.kernel, f"layout {tuple(order)} of {name}", f"an order of the axes 0 to {rank - 1}")
    chosen = (tuple(layouts.get(o.name, ())) for o in signature.outputs)
    return tuple(order if order and list(order) != sorted(order) else None for order in chosen)


def _inverse(order: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _result(outputs: Sequence[Any]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _plan(request: Request, tensors: Sequence[torch.Tensor], on_cpu: bool, op: str) -> Plan:
    kind = "cpu" if on_cpu else device.start()
    if request.is_empty:
        return Plan(run=_empty(request), op=op, device=kind, config="", reason="the output is empty")
    if _sums_nothing(request):
        return Plan(run=_by_reference(request), op=op, device=kind, config="", reason="a summed dim is 0: the reference ran")
    bound = request.bound(device.target() if kind == "tpu" else None)
    run = _cpu_run(request, bound) if on_cpu else _device_run(request, bound)
    return Plan(run=run, op=op, device=kind, config=str(bound.config), reason="")


# --- nothing to run --------------------------------------------------------------------------------------------------


def _empty(request: Request) -> Run:
    def run(tensors: Sequence[torch.Tensor]) -> Any:
        return _result([tensors[0].new_empty(o.shape, dtype=_dtype(o.dtype)) for o in request.signature.outputs])

    return run


def _sums_nothing(request: Request) -> bool:
    """Returns whether a tile kernel would sum over a dim of size 0: its grid would have no step to write the output."""
    k, sizes = request.kernel.declaration, request.signature.sizes
    return request.kernel.is_tile and any(sizes[name] == 0 for name in k.grid)


def _by_reference(request: Request) -> Run:
    kernel, signature = request.kernel, request.signature
    if kernel.reference is None:
        zero = next(name for name in kernel.declaration.grid if signature.sizes[name] == 0)
        found = f"{zero!r} is 0, the output is not empty, and the kernel has no reference"
        raise SignatureError(kernel.name, found, "a size of 1 or more, or a reference to say what the output is")
    reference, saved = kernel.reference, signature.saved

    def run(tensors: Sequence[torch.Tensor]) -> Any:
        results = reference(*tensors, **signature.statics)
        given = iter(results if isinstance(results, tuple | list) else (results,))
        return _result(
            [
                tensors[0].new_zeros(o.shape, dtype=_dtype(o.dtype)) if o.name in saved else next(given).to(_dtype(o.dtype))
                for o in signature.outputs
            ]
        )

    return run


# --- the tpu device --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Physical:
    """A bound kernel as the device calls it: without operands and results that have no elements (torch_tpu refuses them),
    each result in the order that its axes have in memory.

    Attributes:
        kernel: The kernel.
        function: Of the operands at `crossing`, to the results at `returned`.
        specs: Of those operands.
        target: The chip, None for interpret form.
        crossing: Places of the operands that have elements.
        returned: Places of the results that have elements.
        like: Tensors of all results' physical shapes.
        inverses: For each result, the permutation back to its logical shape, or None.
    """

    kernel: "Kernel"
    function: Callable[..., tuple[Any, ...]]
    specs: tuple[Any, ...]
    target: Target | None
    crossing: tuple[int, ...]
    returned: tuple[int, ...]
    like: tuple[torch.Tensor, ...]
    inverses: tuple[tuple[int, ...] | None, ...]

    @property
    def is_plain(self) -> bool:
        """Whether operands and results cross as they are."""
        whole = len(self.crossing) == len(self.kernel.declaration.inputs) and len(self.returned) == len(self.like)
        return whole and not any(self.inverses)


def _physical(request: Request, bound: "Bound") -> Physical:
    signature, permutations = request.signature, request.permutations
    crossing = tuple(at for at, o in enumerate(signature.inputs) if math.prod(o.shape))
    returned = tuple(at for at, o in enumerate(signature.outputs) if math.prod(o.shape))
    like = [
        torch.empty([o.shape[axis] for axis in order] if order else o.shape, dtype=_dtype(o.dtype), device="meta")
        for o, order in zip(signature.outputs, permutations, strict=True)
    ]

    def function(*arrays: Any) -> tuple[Any, ...]:
        import jax.numpy as jnp

        given = dict(zip(crossing, arrays, strict=True))
        whole = [given[at] if at in given else jnp.zeros(spec.shape, spec.dtype) for at, spec in enumerate(bound.specs)]
        results = _checked(signature, bound.function(*whole))
        orders = [permutations[at] for at in returned]
        return tuple(
            jnp.transpose(results[at], order) if order else results[at] for at, order in zip(returned, orders, strict=True)
        )

    return Physical(
        kernel=bound.kernel,
        function=function,
        specs=tuple(bound.specs[at] for at in crossing),
        target=bound.target,
        crossing=crossing,
        returned=returned,
        like=tuple(like),
        inverses=tuple(_inverse(order) if order else None for order in permutations),
    )


def _checked(signature: "Signature", results: Sequence[Any]) -> Sequence[Any]:
    """Returns what a kernel gave if it is what it declared: another shape would end the process inside torch_tpu."""
    found = [f"{r.dtype}[{','.join(map(str, r.shape))}]" for r in results]
    wanted = [f"{o.dtype}[{','.join(map(str, o.shape))}]" for o in signature.outputs]
    if found != wanted:
        raise SignatureError(signature.kernel, f"the kernel gives {', '.join(found)}", f"{', '.join(wanted)} as declared")
    return results


def _device_run(request: Request, bound: "Bound") -> Run:
    physical = _physical(request, bound)
    module = _module(request, physical)
    fingerprint = hashlib.blake2b(module, digest_size=16).hexdigest()
    name = (bound.kernel.op or bound.kernel.name).replace("::", "_")
    entry = torch_tpu_adapter.kernel_entry()
    entry.register(name, fingerprint, module, physical.function)
    call, like = entry.call, list(physical.like)
    if not physical.is_plain:
        return _careful_run(functools.partial(call, name, fingerprint), physical)
    if len(like) == 1:
        return lambda tensors: call(name, fingerprint, tensors, like)[0]
    return lambda tensors: tuple(call(name, fingerprint, tensors, like))


def _careful_run(call: Callable[[Sequence[Any], Sequence[Any]], list[torch.Tensor]], physical: Physical) -> Run:
    full = [physical.like[at] for at in physical.returned]

    def run(tensors: Sequence[torch.Tensor]) -> Any:
        given = iter(call([tensors[at] for at in physical.crossing], full))
        outputs = [next(given) if t.numel() else tensors[0].new_empty(t.shape, dtype=t.dtype) for t in physical.like]
        return _result([t.permute(order) if order else t for t, order in zip(outputs, physical.inverses, strict=True)])

    return run


def _module(request: Request, physical: Physical) -> bytes:
    """Exports for torch_tpu: as Mosaic for a chip, in interpret form for the emulated device."""
    with _precision(request.signature):
        if physical.target is not None:
            return lowering.lower(physical, physical.target).module
        with _interpreting(physical.kernel.name):
            exported = jax_adapter.export_for_tpu(physical.function, physical.specs, physical.kernel.name)
    return bytes(exported.mlir_module_serialized)


@contextlib.contextmanager
def _interpreting(name: str) -> Iterator[None]:
    """Traces in interpret form, whatever the caller is in the middle of, and puts what a body raises in our form."""
    from tpukern.dsl import context

    try:
        with context.entered(context.Context(interpret=True)):
            yield
    except TpukernError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise LowerError(name, f"{type(error).__name__}: {lines[0] if lines else ''}", "a body that JAX can trace") from error


def _precision(signature: "Signature") -> contextlib.AbstractContextManager[Any]:
    """Returns the context that keeps 64-bit operands as they are: JAX would make them 32-bit ones."""
    import jax

    wide = any(o.dtype in _OF_64_BITS for o in (*signature.inputs, *signature.outputs))
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


# --- CPU tensors -----------------------------------------------------------------------------------------------------


def _cpu_run(request: Request, bound: "Bound") -> Run:
    import jax

    physical = _physical(request, bound)
    name = bound.kernel.name
    function = jax.jit(jax_adapter.retraced(physical.function, name))
    place = jax.devices("cpu")[0]
    signature = request.signature

    def call(tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        plain = [tensor.detach().contiguous() for tensor in tensors]
        with _precision(signature), _interpreting(name):
            results = jax.block_until_ready(function(*(jax.dlpack.from_dlpack(t, device=place) for t in plain)))
        lent = {t.data_ptr() for t in plain}  # JAX passes an untouched input through
        outputs = [torch.from_dlpack(result) for result in results]
        return [t.clone() if t.data_ptr() in lent else t for t in outputs]

    return _careful_run(call, physical)
