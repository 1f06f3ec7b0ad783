"""Adoption: a JAX function with `pallas_call`s of its own, as a kernel like any other.

What the function does not say, the dims of its operands, comes from `signature=`. It is traced as it is, for the chip in
question; interpret form is the same trace with every `pallas_call` in it interpreted. So the function needs no argument for
that, and what it asks of the chip is answered for the chip.
"""

import dataclasses
import functools
import importlib.metadata
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import jax
import jax.numpy as jnp
from jax.extend import core

from tpukern import jax_adapter, jaxprs
from tpukern.dsl import context, gradient, operands_text, rules
from tpukern.dsl.bound import specs_of
from tpukern.dsl.config import Config
from tpukern.dsl.declaration import REQUIRED, Declaration, Parameter, each_output
from tpukern.dsl.dims import Named
from tpukern.dsl.frozen import FrozenMapping
from tpukern.dsl.kernel import Kernel, announce
from tpukern.dsl.roles import GridDim, Tunable
from tpukern.dsl.signature import Operand, Signature
from tpukern.dsl.workload import Override, Workload
from tpukern.errors import ConfigError, SignatureError, TpukernError, did_you_mean
from tpukern.targets import TARGETS, Target

if TYPE_CHECKING:
    import numpy as np

Sizes = Mapping[str, int | tuple[int, ...]]
Reject = Callable[[Config, Signature, Target | None], str | None]
Draw = Callable[["np.random.Generator", Signature], Any]

_DTYPES: Final = ("bfloat16", "float32")
_PLAIN: Final = (bool, int, float, str)
_OURS: Final = ("interpret",)  # decided by the context, by rewriting the trace
_PRIMES: Final = (1, 2, 3, 5, 7, 11, 13, 17, 19, 23)
_ASKS: Final = re.compile(r"\b(tpu|cpu|device|devices|backend|platform)s?\b", re.IGNORECASE)
_CUSTOM: Final = ("custom_vjp_call", "custom_jvp_call")


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adoption:
    """What an adopted kernel has beyond a declaration.

    Attributes:
        function: The JAX function.
        sizes: Of a dim, the one number that its size has to be a multiple of, or all sizes that the function takes.
        draw: How example values of an integer operand are made, for `verify`: a NumPy generator and the signature to an array.
        no_gradient: Why none was derived from the function's own, or an empty string.
    """

    function: Callable[..., Any]
    sizes: FrozenMapping[Any]
    draw: Mapping[str, Draw] = dataclasses.field(compare=False, default_factory=dict)
    no_gradient: str = ""

    def problem(self, signature: Signature) -> SignatureError | None:
        """Returns the error for sizes that the function does not take, or None."""
        for name, rule in self.sizes.items():
            size = signature.sizes.get(name, 0)
            if isinstance(rule, tuple):
                if size not in rule:
                    return SignatureError(signature.kernel, f"dim {name!r} is {size}", f"one of {list(rule)}")
            elif size % rule or not size:
                return SignatureError(signature.kernel, f"dim {name!r} is {size}", f"a multiple of {rule}")
        return None

    def sizes_of(self, name: str) -> tuple[int, ...]:
        """Returns sizes to try of a dim; none if the function takes any."""
        rule = self.sizes.get(name, ())
        return rule if isinstance(rule, tuple) else tuple(rule * n for n in (1, 2, 3))

    def describe(self) -> str:
        """Returns what the function depends on beside its source, for cache keys."""
        package = _plain(self.function).__module__.partition(".")[0]
        return repr((package, _version(package), sorted(self.sizes.items()), _held(self.function)))


def adopt(
    function: Callable[..., Any],
    *,
    signature: str,
    op: str | None = None,
    name: str | None = None,
    reference: Callable[..., Any] | None = None,
    backward: Callable[..., Mapping[str, Any]] | bool | None = None,
    dtypes: Sequence[str] = _DTYPES,
    statics: Sequence[str] | None = None,
    choices: Mapping[str, Any] | None = None,
    each: Sequence[str] = (),
    sizes: Sizes | None = None,
    reject: Reject | None = None,
    draw: Mapping[str, Draw] | None = None,
    workloads: Sequence[Workload] = (),
    overrides: Sequence[Override] = (),
    tolerance: Any = None,
) -> Kernel:
    """Makes a kernel of a JAX function that has `pallas_call`s in it. The function is traced once here, to see that it is one.

    Args:
        function: Takes arrays and keywords, returns an array or a tree of them.
        signature: The dims of its operands and results, as `"x: *r d, w: d -> y: *r d"`: operands by the function's names, in
            the order of the call. A dtype may follow the dims; `table` after that marks an array that steers the kernel (group
            sizes, page tables), whose example values a `Workload` gives under `tables=`; `saved` follows a result that is only
            kept for the backward pass.
        op: The torch op to register as, `namespace::name`.
        name: Its name, if not the function's.
        reference: The same in plain torch: without one, verify cannot judge it.
        backward: The backward pass, a JAX function as for `Kernel.backward`. None derives it from the function's own custom
            derivative if it has one that can be traced; True insists on that; False leaves it out.
        dtypes: What the element type shared by the operands without a dtype of their own may be.
        statics: Names of its parameters that become static arguments; None for all others that have a plain default or none.
        choices: Tunables among its parameters, as `{"tile_m": Choice(128, 256)}`.
        each: Dims of which every position is a problem of its own (batch, heads).
        sizes: Of a dim, a number that its size has to be a multiple of, or a tuple of all sizes that the function takes.
        reject: Takes a config, a signature and a target; returns why the function cannot do that, or None.
        draw: For an integer operand, how example values are made for verify: `(rng, signature) -> array`.
        workloads: Named shapes; the first is what the function is traced at here.
        overrides: The ATen ops that it stands in for.
        tolerance: How far it may be from the reference, in ULPs of the output's dtype.

    Returns:
        A kernel of the frontend `jax`.

    Raises:
        SignatureError: It is no JAX function, has no `pallas_call`, cannot be traced without a TPU, or the signature does not
            fit what it takes or returns.
    """
    called = name or str(_plain(function).__name__)
    if not callable(function) or isinstance(function, Kernel):
        raise SignatureError(called if callable(function) else "adopt", f"a {type(function).__name__}", "a JAX function")
    declared = _declaration(called, function, signature, tuple(dtypes), statics, choices or {}, tuple(each))
    rules.check(declared)
    _known_dims(declared, sizes or {}, each)
    adoption = Adoption(
        function=function,
        sizes=FrozenMapping({n: tuple(rule) if isinstance(rule, tuple | list) else rule for n, rule in (sizes or {}).items()}),
        draw=dict(draw or {}),
    )
    caller = sys._getframe(1).f_globals.get("__name__", "__main__")
    made = Kernel(
        declaration=declared,
        fn=_named(function, called, caller),
        frontend="jax",
        op=op,
        reference=reference,
        overrides=tuple(overrides),
        workloads=tuple(workloads),
        tolerance=tolerance,
        build=lambda bound, config: _call(declared, function, bound, config),
        reject=reject,
        adopted=adoption,
    )
    example, traced = _traced(made)
    if backward is not None and not isinstance(backward, bool):
        _give_backward(made, adoption, backward)
    elif backward or (backward is None and _has_own_derivative(traced.jaxpr)):
        _derive(made, example, insist=bool(backward))
    announce(made)
    return made


# --- the declaration -------------------------------------------------------------------------------------------------


def _declaration(
    name: str,
    function: Callable[..., Any],
    text: str,
    dtypes: tuple[str, ...],
    statics: Sequence[str] | None,
    choices: Mapping[str, Any],
    each: tuple[str, ...],
) -> Declaration:
    left, arrow, right = text.partition("->")
    if not arrow:
        raise SignatureError(name, f"no '->' in its signature {text!r}", operands_text.RULE)
    inputs = operands_text.read(name, left, inputs=True)
    outputs = operands_text.read(name, right, inputs=False)
    parameters = _parameters(function)
    if parameters is not None:
        free = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
        told = {"signature": () if free else tuple(o.name for o in inputs), "statics": statics or (), "choices": choices}
        for what, wanted in ((what, wanted) for what, names in told.items() for wanted in names):
            if wanted not in parameters:
                raise SignatureError(
                    name, f"its {what} names {wanted!r}", f"parameters of the function, {list(parameters)}",
                    did_you_mean(wanted, parameters),
                )  # fmt: skip
    kept = _statics(parameters or {}, {o.name for o in inputs} | {*choices, *_OURS}, statics)
    for key, value in choices.items():
        if not isinstance(value, Tunable):
            raise SignatureError(name, f"choices has a {type(value).__name__} for {key!r}", "a tpukern.Choice")
    notes = _annotations(_plain(function))
    return Declaration(
        kernel=name,
        operands=(*inputs, *outputs),
        dims=FrozenMapping({dim: GridDim((), 1, None, each=True) for dim in each}),
        choices=FrozenMapping(dict(choices)),
        statics=FrozenMapping(kept),
        static_types=FrozenMapping({n: notes.get(n, Any) for n in kept}),
        grid=each,
        dtypes=dtypes,
        tile=False,
    )


def _statics(parameters: Mapping[str, inspect.Parameter], taken: set[str], wanted: Sequence[str] | None) -> dict[str, Any]:
    """Returns the default of every parameter that is a static argument."""
    found = {}
    for name, p in parameters.items():
        if name in taken or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        plain = p.default is p.empty or isinstance(p.default, _PLAIN)
        if name in wanted if wanted is not None else plain:
            found[name] = REQUIRED if p.default is p.empty else p.default
    return found


def _known_dims(k: Declaration, sizes: Sizes, each: Sequence[str]) -> None:
    known = list(dict.fromkeys(n for o in k.inputs for n in o.names))
    for what, names in (("sizes", sizes), ("each", each)):
        for name in names:
            if name not in known:
                raise SignatureError(k.kernel, f"{what} names the dim {name!r}", f"one of {known}")


def _plain(function: Any) -> Any:
    """Returns the function under partials, `jax.jit` and other wrappers."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function if hasattr(function, "__name__") else type(function)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError):  # some callables do not tell
        return None


def _annotations(function: Any) -> Mapping[str, Any]:
    try:
        return inspect.get_annotations(function, eval_str=True)
    except (NameError, SyntaxError, AttributeError, TypeError):  # names that only type checkers see
        return {}


def _named(function: Callable[..., Any], name: str, module: str) -> Callable[..., Any]:
    """Returns a stand-in with the kernel's name, of the module that adopts it: what pickling finds it by."""

    def adopted(*arrays: Any, **keywords: Any) -> Any:
        return function(*arrays, **keywords)

    adopted.__name__ = adopted.__qualname__ = name
    adopted.__module__, adopted.__doc__ = module, inspect.getdoc(_plain(function))
    adopted.__annotations__ = dict(_annotations(_plain(function)))
    return adopted


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", ""))


def _held(function: Any) -> list[str]:
    """Returns what partials around a function hold."""
    found = []
    while isinstance(function, functools.partial):
        found.append(repr((function.args, sorted(function.keywords.items()))))
        function = function.func
    return found


# --- running it ------------------------------------------------------------------------------------------------------


def _call(
    k: Declaration, function: Callable[..., Any], signature: Signature, config: Mapping[str, Any]
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the function at one signature and config, for the context in force: arrays in order to its results."""
    seen = _seen(k, signature)
    plain = _applied(k, function, signature, config)

    def call(*arrays: Any) -> tuple[jax.Array, ...]:
        if _is_empty(signature):
            return _nothing(signature)
        results = _fitting(seen, run(signature.kernel, plain, _shaped(seen.inputs, arrays)))
        return tuple(_shaped(signature.outputs, results))

    return call


def _seen(k: Declaration, signature: Signature) -> Signature:
    """Returns a signature as the function sees it: the leading axes that `*` stands for as one."""
    starred = {o.name for o in k.operands if o.array_axes and isinstance(o.array_axes[0], Named) and o.array_axes[0].leading}
    count = len(signature.leading or ())

    def one(o: Operand) -> Operand:
        if o.name not in starred:
            return o
        return dataclasses.replace(o, shape=(math.prod(o.shape[:count]), *o.shape[count:]))

    inputs, outputs = (tuple(map(one, side)) for side in (signature.inputs, signature.outputs))
    return dataclasses.replace(signature, inputs=inputs, outputs=outputs)


def _shaped(operands: Sequence[Operand], arrays: Sequence[Any]) -> list[Any]:
    return [jnp.reshape(a, o.shape) for o, a in zip(operands, arrays, strict=True)]


def _applied(
    k: Declaration, function: Callable[..., Any], signature: Signature, config: Mapping[str, Any]
) -> Callable[..., Any]:
    """Returns the function of its arrays alone, in declared order: by name if it has names for them."""
    parameters, keywords = _parameters(function) or {}, {**signature.statics, **config}
    names = [o.name for o in k.inputs]
    by_name = all(n in parameters and parameters[n].kind is not inspect.Parameter.POSITIONAL_ONLY for n in names)

    def plain(*arrays: Any) -> Any:
        if by_name:
            return function(**dict(zip(names, arrays, strict=True)), **keywords)
        return function(*arrays, **keywords)

    return plain


def run(name: str, function: Callable[..., Any], arrays: Sequence[Any]) -> list[jax.Array]:
    """Runs a function with `pallas_call`s of its own under the context in force: for a chip, or interpreted.

    Returns:
        The leaves of its result.
    """
    now = context.current()
    closed = trace(name, function, arrays, now.target)

    def decided(eqn: Any, place: jaxprs.Place) -> Any:
        if eqn.primitive.name != "pallas_call":
            return None
        effects = jax_adapter.interpreter_effects(now.interpreted)
        own = eqn.effects - jax_adapter.interpreter_effects(eqn.params["interpret"])
        return eqn.replace(params={**eqn.params, "interpret": now.interpreted}, effects=own | effects)

    return list(core.jaxpr_as_fun(jaxprs.rewrite(closed, decided))(*arrays))


def trace(name: str, function: Callable[..., Any], arrays: Sequence[Any], target: Target | None) -> core.ClosedJaxpr:
    """Traces a function for a chip (v5e if there is none) as if it were there."""
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]

    def flat(*given: Any) -> list[Any]:
        return jax.tree.leaves(function(*given))

    with jax_adapter.device_context(target or TARGETS["v5e"]):
        return jax.make_jaxpr(jax_adapter.retraced(flat, name))(*specs)


def _fitting(signature: Signature, results: Sequence[Any]) -> tuple[jax.Array, ...]:
    """Returns the results if they are what the signature says.

    Raises:
        SignatureError: They are not.
    """
    wanted = ", ".join(map(str, signature.outputs))
    if len(results) != len(signature.outputs):
        found = f"the function returns {len(results)} array{'s' * (len(results) != 1)}, {', '.join(map(_shown, results))}"
        raise SignatureError(signature.kernel, found, f"{len(signature.outputs)} as the signature says: {wanted}")
    for o, result in zip(signature.outputs, results, strict=True):
        if tuple(result.shape) != o.shape or str(result.dtype) != o.dtype:
            found = f"the function returns {_shown(result)} for {o.name}"
            raise SignatureError(signature.kernel, found, f"{o} as the signature says")
    return tuple(results)


def _shown(array: Any) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _is_empty(signature: Signature) -> bool:
    return any(0 in o.shape for o in (*signature.inputs, *signature.outputs))


def _nothing(signature: Signature) -> tuple[jax.Array, ...]:
    full = [o for o in signature.outputs if 0 not in o.shape]
    if full:
        empty = next(o for o in signature.inputs if 0 in o.shape)
        found = f"{empty} is empty and output {full[0].name} is not"
        raise SignatureError(signature.kernel, found, "the reference to be called", "Zero-size sums never reach the kernel.")
    return tuple(jnp.zeros(o.shape, o.dtype) for o in signature.outputs)


# --- the trace at adoption -------------------------------------------------------------------------------------------


def _traced(kernel: Kernel) -> tuple[Signature, core.ClosedJaxpr]:
    """Traces a newly adopted function once, at its first workload or at made-up sizes, and checks what it finds.

    Raises:
        SignatureError: It cannot be traced, has no `pallas_call`, or returns something else than the signature says.
    """
    k, adoption = kernel.declaration, kernel.adopted
    assert adoption is not None
    signature = kernel.workload_signature(kernel.workloads[0]) if kernel.workloads else _made_up(kernel, adoption)
    try:
        config = kernel.default_config(signature)
    except (ConfigError, SignatureError) as error:
        do = "Give it workloads= at sizes that it takes." if not kernel.workloads else ""
        raise SignatureError(k.kernel, f"its own rules refuse {signature}: {error}", "sizes that it takes", do) from error
    seen = _seen(k, signature)
    try:
        closed = trace(k.kernel, _applied(k, adoption.function, signature, config), specs_of(seen), None)
    except TpukernError:
        raise
    except Exception as error:
        raise _untraceable(kernel, seen, error) from error
    if not any(eqn.primitive.name == "pallas_call" for eqn in jaxprs.equations(closed.jaxpr)):
        found = f"there is no pallas_call in it, traced at {', '.join(map(str, seen.inputs))}"
        raise SignatureError(k.kernel, found, "one or more", "What XLA compiles by itself needs no kernel.")
    _fitting(seen, [v.aval for v in closed.jaxpr.outvars])
    return signature, closed


def _made_up(kernel: Kernel, adoption: Adoption) -> Signature:
    k = kernel.declaration
    fixed = {n: k.statics[n] for n in k.int_statics if k.statics[n] is not REQUIRED}
    names = [n for n in dict.fromkeys(n for o in k.inputs for n in o.names) if n not in fixed]
    values: dict[str, Any] = {}
    for place, name in enumerate(names):
        rule = adoption.sizes.get(name, 1 if name in k.dims else 128)
        values[name] = rule[0] if isinstance(rule, tuple) else rule * _PRIMES[place % len(_PRIMES)]
    missing = [n for n, default in k.statics.items() if default is REQUIRED and n not in values]
    if missing:
        do = "The function is traced once when it is adopted."
        raise SignatureError(k.kernel, f"no value for {missing[0]!r}", "workloads= that give one", do)
    dtype = k.dtypes[0] if k.dtypes else "float32"
    return kernel.workload_signature(Workload("made up", dtype=dtype, **values))


def _untraceable(kernel: Kernel, signature: Signature, error: Exception) -> SignatureError:
    lines = str(error).strip().splitlines()
    said = lines[0].rstrip(".") if lines else "no message"
    found = f"it raised {type(error).__name__}: {said}, traced at {', '.join(map(str, signature.inputs))}"
    if _ASKS.search(said):
        rule = "a function that can be traced without a TPU"
        do = "What it asks of jax.devices() or jax.default_backend() has to be an argument; pltpu.get_tpu_info() is answered."
    else:
        rule = "a function of JAX arrays that takes these"
        do = "" if kernel.workloads else "Give it workloads= at sizes that it takes."
    return SignatureError(kernel.name, found, rule, do)


# --- gradients -------------------------------------------------------------------------------------------------------


def _has_own_derivative(jaxpr: Any) -> bool:
    """Whether a `pallas_call` stands under a custom derivative."""
    for eqn in jaxpr.eqns:
        inner = jaxprs.inside(eqn)
        if eqn.primitive.name in _CUSTOM:
            return any(e.primitive.name == "pallas_call" for j in inner for e in jaxprs.equations(j))
        if eqn.primitive.name != "pallas_call" and any(_has_own_derivative(j) for j in inner):
            return True
    return False


def _give_backward(kernel: Kernel, adoption: Adoption, function: Callable[..., Mapping[str, Any]]) -> None:
    """Declares a backward pass that is a JAX function with or without `pallas_call`s of its own."""
    declared = gradient.declaration_of(kernel.declaration, function, None)
    _set(kernel, declared, function, lambda arrays, signature, config: function(**arrays, **signature.statics))


def _derive(kernel: Kernel, example: Signature, *, insist: bool) -> None:
    """Declares the derivative of the function as its backward pass, if it can be traced."""
    k, adoption = kernel.declaration, kernel.adopted
    assert adoption is not None
    wanted = gradient.differentiable(k)

    def backward(arrays: Mapping[str, Any], signature: Signature, config: Mapping[str, Any]) -> dict[str, Any]:
        forward = {o.name: arrays[o.name] for o in k.inputs}
        function = _applied(k, adoption.function, signature, config)

        def of(*moved: Any) -> Any:
            given = {**forward, **{o.name: a for o, a in zip(wanted, moved, strict=True)}}
            return jax.tree.leaves(function(*given.values()))

        results, pull = jax.vjp(of, *(forward[o.name] for o in wanted))
        saved = {o.name for o, role in each_output(k) if role.saved}
        cotangents = [
            jnp.zeros(r.shape, r.dtype) if o.name in saved else arrays[f"d{o.name}"]
            for o, r in zip(k.outputs, results, strict=True)
        ]
        return {f"d{o.name}": g for o, g in zip(wanted, pull(cotangents), strict=True)}

    declared = _derived_declaration(k, wanted)
    made = _set(kernel, declared, adoption.function, backward, reject=kernel.reject)
    at = kernel.gradient_signature(example)
    try:
        with context.entered(context.Context(target=None, interpret=False)):
            trace(made.name, made.bind_signature(at).function, specs_of(at), None)
    except Exception as error:
        kernel.gradient = None
        said = " ".join(str(error).split())[:300]
        reason = f"{type(error).__name__}: {said}"
        kernel.adopted = dataclasses.replace(adoption, no_gradient=reason)
        if insist:
            found = f"its own derivative raised {reason.rstrip('.')}"
            raise SignatureError(kernel.name, found, "one that can be traced", "Give backward= as a JAX function.") from error


def _derived_declaration(k: Declaration, wanted: Sequence[Parameter]) -> Declaration:
    given = [(f"d{o.name}", o) for o, role in each_output(k) if not role.saved]
    operands = [*k.inputs, *(gradient.as_input(n, o) for n, o in given)]
    operands += [gradient.as_output(f"d{o.name}", o) for o in wanted]
    return dataclasses.replace(k, kernel=f"{k.kernel}_backward", operands=tuple(operands))


def _set(
    kernel: Kernel,
    declared: Declaration,
    source: Callable[..., Any],
    function: Callable[[Mapping[str, Any], Signature, Mapping[str, Any]], Mapping[str, Any]],
    reject: Reject | None = None,
) -> Kernel:
    """Declares a backward pass: `function` takes its arrays by name, its signature and its config; gives gradients by name."""

    def build(signature: Signature, config: Config) -> Callable[..., tuple[jax.Array, ...]]:
        names, seen = [o.name for o in signature.inputs], _seen(declared, signature)

        def plain(*arrays: Any) -> list[Any]:
            found = function(dict(zip(names, arrays, strict=True)), signature, config)
            return list(gradient.gradients(seen, found))

        def call(*arrays: Any) -> tuple[jax.Array, ...]:
            if _is_empty(signature):  # sums over nothing
                return tuple(jnp.zeros(o.shape, o.dtype) for o in signature.outputs)
            return tuple(_shaped(signature.outputs, run(signature.kernel, plain, _shaped(seen.inputs, arrays))))

        return call

    rules.check(declared)
    adoption = kernel.adopted
    assert adoption is not None
    made = Kernel(
        declaration=declared,
        fn=_named(source, declared.kernel, kernel.fn.__module__),
        frontend="jax",
        op=f"{kernel.op}_backward" if kernel.op else None,
        build=build,
        reject=reject,
        adopted=dataclasses.replace(adoption, function=source),
    )
    return kernel.backward(made)
