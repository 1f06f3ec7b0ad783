"""The `Kernel` object: one kernel and all that can be asked of it."""

import functools
import importlib
import inspect
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final, overload

import jax

from tpukern import jax_adapter
from tpukern.dsl import composite, context, declared, gradient, naming, rules, source, space, tile
from tpukern.dsl.bound import Bound, specs_of
from tpukern.dsl.config import Config
from tpukern.dsl.declaration import Declaration
from tpukern.dsl.geometry import Geometry
from tpukern.dsl.helion_form import HelionForm
from tpukern.dsl.signature import Signature, bind
from tpukern.dsl.workload import Override, Workload
from tpukern.errors import SignatureError
from tpukern.targets import Target
from tpukern.targets import target as target_named

if TYPE_CHECKING:
    from tpukern.dsl.adoption import Adoption


@final
class Kernel:
    """One kernel: declaration, body, reference, overrides, workloads and, if it has one, gradient.

    Attributes:
        name: Its name, unique among kernels.
        op: The torch op it is registered as, or None.
        dtypes: The element types it takes.
        frontend: `pallas`, `helion`, or `jax` for a JAX function: an adopted one, or a backward pass written as one.
        reference: The same in plain torch, or None.
        overrides: The ATen ops that it stands in for.
        workloads: Named shapes.
        tolerance: How far it may be from the reference, in ULPs of the output's dtype; None for the usual.
        declaration: Operands, dims, choices and statics.
        fn: The decorated function.
        doc: Its docstring.
        vmem_limit_bytes: VMEM it asks for, if more than the chip gives by itself.
        reject: `(config, signature, target)` to the reason why that config is no good, or None.
        declared_at: When, in seconds since the epoch: source files changed later are not what runs.
        gradient: The backward kernel, or None.
        forward: The kernel that this one is the gradient of, or None.
        helion: What a kernel of the Helion frontend has beyond this, or None.
        adopted: What an adopted JAX function has beyond this, or None.
        torch_op, torch_call, torch_launch: What dispatch keeps here, so that calls on torch tensors need not look for it.
    """

    def __init__(
        self,
        *,
        declaration: Declaration,
        fn: Callable[..., Any],
        frontend: str = "pallas",
        op: str | None = None,
        reference: Callable[..., Any] | None = None,
        overrides: tuple[Override, ...] = (),
        workloads: tuple[Workload, ...] = (),
        tolerance: Any = None,
        build: Callable[[Signature, Config], Callable[..., Any]] | None = None,
        vmem_limit_bytes: int | None = None,
        reject: Callable[[Config, Signature, Target | None], str | None] | None = None,
        helion: HelionForm | None = None,
        adopted: "Adoption | None" = None,
    ) -> None:
        self.helion, self.adopted = helion, adopted
        self.name, self.op, self.dtypes = declaration.kernel, op, declaration.dtypes
        self.declaration, self.fn, self.frontend, self.doc = declaration, fn, frontend, inspect.getdoc(fn) or ""
        self.reference, self.overrides, self.workloads, self.tolerance = reference, overrides, workloads, tolerance
        self.build, self.vmem_limit_bytes, self.reject = build, vmem_limit_bytes, reject
        self.declared_at = time.time()
        self.gradient: Kernel | None = None
        self.forward: Kernel | None = None
        self.torch_op: Any = None
        self.torch_call: Callable[..., Any] | None = None
        self.torch_launch: Callable[..., Any] | None = None
        self._casts: dict[str, str | None] = {}
        self._split = frozenset((*declaration.statics,))
        self._bind = functools.lru_cache(maxsize=512)(self._bind_uncached)
        self._jitted = functools.lru_cache(maxsize=512)(_jitted)
        self.calls = functools.lru_cache(maxsize=128)(self._calls)
        self._configs = functools.lru_cache(maxsize=128)(functools.partial(space.configs, self))
        self._default = functools.lru_cache(maxsize=512)(functools.partial(space.default, self))
        self._largest = functools.lru_cache(maxsize=512)(functools.partial(space.largest, self))
        functools.update_wrapper(self, fn)

    def __repr__(self) -> str:
        return f"<Kernel {self.name}>"

    # A copy of a model holds the same kernels, as it does functions

    def __copy__(self) -> "Kernel":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Kernel":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return naming.reduced(self)

    # What it is

    @property
    def is_tile(self) -> bool:
        """Whether its function is the body of one grid."""
        return self.declaration.tile

    @property
    def directions(self) -> dict[str, "Kernel"]:
        """`forward` and, if there is a gradient, `backward`."""
        return {"forward": self} | ({"backward": self.gradient} if self.gradient else {})

    def source_files(self) -> tuple[Any, ...]:
        """Returns the files that its behaviour depends on: see `tpukern.dsl.source.files`."""
        return source.files(self._functions())

    def source_digest(self) -> str:
        """Returns a digest of all that its behaviour depends on, short of what a call says."""
        k = self.declaration
        declared = repr(
            (k.kernel, [(o.name, o.role) for o in k.operands], list(k.dims), dict(self._casts), self.vmem_limit_bytes)
        )
        more = "".join(form.describe() for form in (self.helion, self.adopted) if form is not None)
        return source.digest(self._functions(), declared + more)

    def _functions(self) -> tuple[Callable[..., Any], ...]:
        spans = (dim.span for dim in self.declaration.dims.values())
        adopted = self.adopted.function if self.adopted is not None else None
        return tuple(f for f in (self.fn, self.build, self.reject, adopted, *spans) if f is not None)

    # Signatures

    def signature(self, *arrays: Any, **statics: Any) -> Signature:
        """Binds operands to the declared dims.

        Args:
            arrays: One for each input: jax or numpy arrays, torch tensors, `ShapeDtypeStruct`s.
            statics: Static arguments.

        Raises:
            SignatureError: Count, rank, size or dtype do not fit the declaration.
            ConfigError: A static argument is unknown or missing.
        """
        return bind(self.declaration, arrays, statics, self._casts)

    def workload_signature(self, workload: Workload) -> Signature:
        """Returns the signature of a named workload; of a gradient, that of its forward kernel's workload.

        Raises:
            ConfigError: The workload lacks a size, or has a name that is neither a dim nor a static argument.
        """
        from tpukern.dsl import shapes  # needs Kernel

        return shapes.workload_signature(self, workload)

    def gradient_signature(self, signature: Signature) -> Signature:
        """Returns the signature of the gradient of a call, from that of the call.

        Raises:
            SignatureError: The kernel has no gradient.
        """
        if self.gradient is None:
            raise SignatureError(self.name, "it has no backward", f"one, declared with @{self.name}.backward")
        arrays: dict[str, Any] = {o.name: o for o in (*signature.inputs, *signature.outputs)}
        arrays |= {f"d{o.name}": o for o in signature.outputs}
        wanted, statics = gradient.operands(self.gradient, signature, arrays)
        return self.gradient.signature(*wanted, **statics)

    # Configs

    def configs(self, signature: Signature, target: Target | str | None = None) -> tuple[Config, ...]:
        """Returns the distinct legal configs; configs equal after min(block, size) are one."""
        return self._configs((signature,), _target(target))

    def default_config(self, signature: Signature, target: Target | str | None = None) -> Config:
        """Returns the config to use where none is given: for a target the tuned one on record, else `declared_config`."""
        return self._default((signature,), _target(target))

    def declared_config(self, signature: Signature, target: Target | str | None = None) -> Config:
        """Returns the declared defaults, stepped down until legal and, for a target, until the VMEM estimate fits."""
        return space.declared(self, (signature,), _target(target))

    def config_origin(self, signature: Signature, target: Target | str | None = None) -> str:
        """Says where `default_config` comes from: "user record", "shipped record of r=8192,d=4096", "default", ..."""
        chip = _target(target)
        known = space.recorded(self, (signature,), chip)
        if known is not None:
            return str(known[1])
        inner = [(c.kernel.name, space.recorded(c.kernel, c.signatures, chip)) for c in self.calls((signature,))]
        parts = [f"{name}: {found[1]}" for name, found in inner if found is not None]
        return "; ".join(parts) or "default"

    def forget_defaults(self) -> None:
        """Asks for recorded configs again: call it where records were written while the process runs."""
        self._default.cache_clear()
        self._bind.cache_clear()

    def largest_config(self, signature: Signature) -> Config:
        """Returns the legal config of the largest blocks, for interpret form."""
        return self._largest((signature,))

    def _calls(self, signatures: tuple[Signature, ...]) -> tuple[composite.Call, ...]:
        """Returns the kernels that a composite calls at these signatures; none for a tile kernel or an adopted function."""
        found: list[composite.Call] = []
        for signature in () if self.is_tile or self.helion or self.adopted else signatures:
            found += composite.calls_of(self._frontend(signature, space.own_default(self)), specs_of(signature))
        return composite.merged(found)

    # Binding

    def bind(self, *arrays: Any, config: Config | None = None, target: Target | str | None = None, **keywords: Any) -> Bound:
        """Binds operands, statics and a config.

        Args:
            arrays: As for `signature`.
            config: Some or all config keys; None for the default of the target.
            target: The chip.
            keywords: Static arguments and config keys, which win over `config`.

        Raises:
            SignatureError: The operands do not fit.
            ConfigError: A keyword is unknown, or the config is not legal.
            LowerError: Mosaic cannot tile a block.
        """
        statics, keys = self._sorted_out(keywords)
        signature = self.signature(*arrays, **statics)
        return self.bind_signature(signature, Config({**(config or {}), **keys}), target)

    def bind_signature(
        self, signature: Signature, config: Mapping[str, Any] | None = None, target: Target | str | None = None
    ) -> Bound:
        """Binds a signature and a config: see `bind`."""
        return self._bind(signature, config if isinstance(config, Config) else Config(config), _target(target), False)

    def _bind_uncached(self, signature: Signature, given: Config, target: Target | None, largest: bool) -> Bound:
        config = space.resolve(self, (signature,), given, self._base(signature, given, target, largest), target)
        run = self._frontend(signature, config)
        inner = {call.kernel.name: config.within(call.kernel.name) for call in self.calls((signature,))}

        def function(*arrays: Any) -> tuple[jax.Array, ...]:
            with context.using(target=target, configs=inner):
                return run(*arrays)

        function.__name__ = self.name
        return Bound(
            kernel=self, signature=signature, config=config, target=target, function=function if inner or target else run
        )

    def _base(self, signature: Signature, given: Config, target: Target | None, largest: bool) -> Config:
        """Returns the config that `given` is laid over. If it is complete, no default has to be legal."""
        own = space.own_default(self)
        if self.is_tile and all(key in given for key in own):
            return own
        return self._largest((signature,)) if largest else self._default((signature,), target)

    def _frontend(self, signature: Signature, config: Config) -> Callable[..., tuple[jax.Array, ...]]:
        if self.helion is not None:
            return self.helion.build(self, signature, config)
        if self.build is not None:
            return _checked(signature, self.build(signature, config))
        if self.is_tile:
            return tile.build(self.fn, Geometry(self.declaration, signature, config), self.vmem_limit_bytes)
        return functools.partial(gradient.run_function, self.fn, signature)

    def _sorted_out(self, keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        statics = {name: value for name, value in keywords.items() if name in self._split}
        return statics, {name: value for name, value in keywords.items() if name not in self._split}

    # Calling

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Runs the kernel: on jax arrays under the context in force, on torch tensors as its torch op.

        Args:
            args: The inputs, in order.
            keywords: Static arguments and config keys.

        Returns:
            The output; several as a tuple, in order of declaration. On torch tensors, only those that are not `saved`.
        """
        if self.helion is not None:
            args, keywords = self.helion.arguments(args, keywords)
        for arg in args:
            if hasattr(arg, "requires_grad"):
                call = self.torch_call or importlib.import_module("tpukern.dispatch").call
                return call(self, args, keywords)
        outputs = self.run(*args, **keywords)
        return outputs[0] if len(outputs) == 1 else outputs

    def launch(self, *tensors: Any, layouts: Mapping[str, tuple[int, ...]] | None = None, **keywords: Any) -> Any:
        """Runs the kernel on torch tensors without autograd, for the body of an override.

        Args:
            tensors: The inputs, in order.
            layouts: For an output by name, the physical order of its axes, outermost first; the tensor returned has the
                logical shape and those strides.
            keywords: Static arguments.

        Returns:
            The output; several as a tuple, `saved` ones included.
        """
        if self.torch_launch is not None:
            return self.torch_launch(tensors, keywords, layouts)
        return importlib.import_module("tpukern.dispatch").launch(self, tensors, keywords, layouts)

    def run(self, *arrays: Any, **keywords: Any) -> tuple[jax.Array, ...]:
        """Runs the kernel on jax arrays under the context in force and returns the tuple of its outputs."""
        now = context.current()
        statics, keys = self._sorted_out(keywords)
        arrays = self._as_arrays(arrays)
        signature = self.signature(*arrays, **statics)
        if now.recorder is not None:
            return composite.record(composite.Call(self, (signature,), frozenset(keys)))
        given = Config({**now.configs.get(self.name, {}), **keys})
        interpret = now.interpreted
        bound = self._bind(signature, given, now.target, bool(interpret))

        def execute(*inputs: Any) -> tuple[jax.Array, ...]:
            if any(isinstance(array, jax.core.Tracer) for array in inputs):
                return bound.function(*inputs)
            return self._jitted(bound, interpret)(*inputs)

        return gradient.with_gradient(self, signature, execute)(*arrays) if self.gradient else execute(*arrays)

    def _as_arrays(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """Turns the Python numbers among the arguments into the scalars that they are declared as."""
        if not any(isinstance(array, int | float) for array in arrays):
            return arrays
        roles = [o.role for o in self.declaration.inputs]
        return (
            tuple(
                jax.numpy.asarray(array, role.dtype) if isinstance(array, int | float) and not role.dims else array
                for array, role in zip(arrays, roles, strict=False)
            )
            + arrays[len(roles) :]
        )

    # Gradients

    @overload
    def backward(self, function: "Kernel", /) -> "Kernel": ...
    @overload
    def backward(self, function: Callable[..., Any], /) -> "Kernel": ...
    @overload
    def backward(self, /, *, gives: tuple[str, ...]) -> Callable[[Callable[..., Any]], "Kernel"]: ...
    def backward(self, function: Any = None, /, *, gives: tuple[str, ...] | None = None) -> Any:
        """Declares the backward pass: a kernel or a JAX function, bound by the names of its parameters.

        It may take forward operands, forward outputs, static arguments and `d<out>` for outputs that are not `saved`; it
        gives `d<in>`, a function as a dict. Gradients are cast to the type of their input.

        Args:
            function: The kernel or function.
            gives: For a function, the inputs that it returns a gradient for, if not all that can have one.

        Raises:
            SignatureError: A name is none of the forward kernel's, or a cotangent is forgotten.
        """
        if function is None:
            return functools.partial(self._set_gradient, gives=gives)
        return self._set_gradient(function, gives=gives)

    def _set_gradient(self, function: Any, *, gives: tuple[str, ...] | None) -> "Kernel":
        if isinstance(function, Kernel):
            given = tuple(o.name for o in function.declaration.outputs)
            takes = tuple(o.name for o in function.declaration.inputs)
            gradient.check(self.declaration, function.name, takes, given)
            backward = function
        else:
            declaration = gradient.declaration_of(self.declaration, function, gives)
            rules.check(declaration)
            op = f"{self.op}_backward" if self.op else None
            backward = Kernel(declaration=declaration, fn=function, frontend="jax", op=op)
        backward._casts = gradient.casts(self.declaration, tuple(o.name for o in backward.declaration.outputs))
        backward.forward, self.gradient = self, backward
        announce(self)
        return backward


def announce(kernel: Kernel) -> None:
    """Tells whoever listens that a kernel is there or has got a gradient, and torch if it is loaded.

    The op is there, then, before `torch.compile` traces the first call.
    """
    if kernel.op is not None and "torch" in sys.modules:
        importlib.import_module("tpukern.dispatch").listen()
    declared.announce(kernel)


def _jitted(bound: Bound, interpret: Any) -> Callable[..., tuple[jax.Array, ...]]:
    return jax.jit(jax_adapter.retraced(bound.function, bound.kernel.name))


def _target(target: Target | str | None) -> Target | None:
    return target_named(target) if isinstance(target, str) else target


def _checked(signature: Signature, function: Callable[..., Any]) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns what a `build` returned, with its result as a tuple of the declared shapes and dtypes."""

    def call(*arrays: Any) -> tuple[jax.Array, ...]:
        result = function(*arrays)
        results = tuple(result) if isinstance(result, tuple | list) else (result,)
        if len(results) != len(signature.outputs):
            found = f"build gave {len(results)} outputs"
            raise SignatureError(signature.kernel, found, f"{len(signature.outputs)}: {', '.join(map(str, signature.outputs))}")
        for o, array in zip(signature.outputs, results, strict=True):
            if tuple(array.shape) != o.shape or array.dtype != o.dtype:
                found = f"build gave {array.dtype}[{','.join(map(str, array.shape))}] for {o.name}"
                raise SignatureError(signature.kernel, found, str(o))
        return results

    return call
