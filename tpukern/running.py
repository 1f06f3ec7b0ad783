"""How one request runs: handed to torch_tpu, compiled for the CPU, or without a kernel where there is nothing to compute.

On the ``tpu`` device a kernel is exported once and registered with torch_tpu: as Mosaic for a chip, in interpret form for the
emulated device. On CPU tensors its interpret form is compiled by JAX and shares memory with torch.
"""

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from tpukern import device, jax_adapter, lowering, torch_tpu_adapter
from tpukern.errors import LowerError, SignatureError, TpukernError
from tpukern.targets import Target

if TYPE_CHECKING:
    from tpukern.dsl import Bound, Config, Kernel, Signature

Layouts = Mapping[str, tuple[int, ...]]
Run = Callable[[Sequence[torch.Tensor]], Any]

_OF_64_BITS: Final = ("int64", "uint64", "float64")


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

    @property
    def sums_nothing(self) -> bool:
        """Whether a tile kernel would sum over a dim of size 0: its grid would have no step."""
        k, sizes = self.kernel.declaration, self.signature.sizes
        return self.kernel.is_tile and any(sizes[name] == 0 for name in k.grid)

    def bound(self, target: Target | None) -> "Bound":
        """Returns the kernel bound for a chip, or, without one, in the largest blocks: interpret form pays by the step."""
        from tpukern.dsl import Config

        config = self.config
        if target is None:
            known = self.kernel.declaration.keys
            if not (self.kernel.is_tile and all(key in config for key in known)):
                config = Config({**self.kernel.largest_config(self.signature), **config})
        return self.kernel.bind_signature(self.signature, config, target)


def _origin(request: Request, target: Target | None) -> str:
    """Says where the config for a chip comes from."""
    if target is None:
        return ""
    given = "given" if request.config else ""
    if request.kernel.is_tile and all(key in request.config for key in request.kernel.declaration.keys) and given:
        return given
    rest = request.kernel.config_origin(request.signature, target)
    return f"{given}, rest: {rest}" if given else rest


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


class Tally:
    """How often something ran."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request that has only to be run.

    Attributes:
        run: Tensors to what the launch returns; counts itself in `tally`.
        tally: How often it ran.
        device: "tpu", "emulated" or "cpu".
        config: The config's text; empty where no kernel runs.
        origin: For a chip, where the config comes from: "given", "user record", "shipped record of r=8192", "default".
        reason: Why no kernel runs, if none does.
        entry: What torch_tpu knows the kernel by: name, fingerprint, and tensors of the results' shapes.
    """

    run: Run
    tally: Tally
    device: str
    config: str = ""
    origin: str = ""
    reason: str = ""
    entry: tuple[str, str, list[torch.Tensor]] | None = None


def prepare(request: Request, *, on_cpu: bool) -> Prepared:
    """Binds, exports or compiles what a request needs.

    Raises:
        ConfigError: The config is not legal.
        SignatureError: The kernel does not give what it declares, or sums over nothing and has no reference.
        LowerError: Its body cannot be traced.
    """
    kind = "cpu" if on_cpu else device.start()
    if request.is_empty:
        return _counted(_empty(request), device=kind, reason="the output is empty")
    if request.sums_nothing:
        what = "the reference ran" if request.kernel.forward is None else "nothing is added up"
        return _counted(_sum_of_nothing(request), device=kind, reason=f"a summed dim is 0: {what}")
    if on_cpu:
        return _on_cpu(request, request.bound(None))
    return _on_device(request, request.bound(device.target() if kind == "tpu" else None), kind)


def _counted(run: Run, **known: Any) -> Prepared:
    tally = Tally()

    def counted(tensors: Sequence[torch.Tensor]) -> Any:
        tally.calls += 1
        return run(tensors)

    return Prepared(run=counted, tally=tally, **known)


# --- nothing to run --------------------------------------------------------------------------------------------------


def _empty(request: Request) -> Run:
    shapes = [(o.shape, _dtype(o.dtype)) for o in request.signature.outputs]
    return lambda tensors: _result([tensors[0].new_empty(shape, dtype=dtype) for shape, dtype in shapes])


def _sum_of_nothing(request: Request) -> Run:
    """Returns what gives a tile kernel's outputs where its grid has no step that would write them.

    Of a forward pass the reference says what they are; what it saves for the backward pass is zeros, which that does not read.
    Gradients are sums: what `init` says, or zeros.
    """
    kernel, signature = request.kernel, request.signature
    roles = {o.name: o.role for o in kernel.declaration.outputs}
    told = () if kernel.forward is not None else tuple(o.name for o in signature.outputs if o.name not in signature.saved)
    if told and kernel.reference is None:
        zero = next(name for name in kernel.declaration.grid if signature.sizes[name] == 0)
        found = f"{zero!r} is 0, the output is not empty, and the kernel has no reference"
        raise SignatureError(kernel.name, found, "a size of 1 or more, or a reference to say what the output is")

    def run(tensors: Sequence[torch.Tensor]) -> Any:
        results = kernel.reference(*tensors, **signature.statics) if told and kernel.reference else ()
        given = dict(zip(told, results if isinstance(results, tuple | list) else (results,), strict=bool(told)))
        return _result(
            [
                given[o.name].to(_dtype(o.dtype))
                if o.name in given
                else tensors[0].new_full(o.shape, getattr(roles[o.name], "init", None) or 0, dtype=_dtype(o.dtype))
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


def _on_device(request: Request, bound: "Bound", kind: str) -> Prepared:
    physical = _physical(request, bound)
    module = _module(request, physical)
    fingerprint = hashlib.blake2b(module, digest_size=16).hexdigest()
    name = (bound.kernel.op or bound.kernel.name).replace("::", "_")
    entry = torch_tpu_adapter.kernel_entry()
    entry.register(name, fingerprint, module, physical.function)
    like = [physical.like[at] for at in physical.returned]
    tally = Tally()
    call = entry.prepared(name, fingerprint, like, tally)
    run = call if physical.is_plain else _careful_run(call, physical)
    return Prepared(
        run=run, tally=tally, device=kind, config=str(bound.config), origin=_origin(request, bound.target),
        entry=(name, fingerprint, like),
    )  # fmt: skip


def _careful_run(call: Run, physical: Physical) -> Run:
    def run(tensors: Sequence[torch.Tensor]) -> Any:
        results = call([tensors[at] for at in physical.crossing])
        given = iter(results if isinstance(results, tuple) else (results,))
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


def _on_cpu(request: Request, bound: "Bound") -> Prepared:
    import jax

    physical = _physical(request, bound)
    name = bound.kernel.name
    function = jax.jit(jax_adapter.retraced(physical.function, name))
    place = jax.devices("cpu")[0]
    signature = request.signature

    def call(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        plain = [tensor.detach().contiguous() for tensor in tensors]
        with _precision(signature), _interpreting(name):
            results = jax.block_until_ready(function(*(jax.dlpack.from_dlpack(t, device=place) for t in plain)))
        lent = {t.data_ptr() for t in plain}  # JAX passes an untouched input through
        outputs = [torch.from_dlpack(result) for result in results]
        return tuple(t.clone() if t.data_ptr() in lent else t for t in outputs)

    return _counted(_careful_run(call, physical), device="cpu", config=str(bound.config))
