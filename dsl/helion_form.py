"""The Helion form: a function over torch tensors with `hl.tile` loops, as a kernel like any other.

What such a function does not say, the dims of its tensors, comes from `signature=` or is read off its source
(`helion_source`); outputs that nobody declared come from one run of the generated code on shapes alone.
"""

import contextlib
import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np

from tpukern import helion_adapter
from tpukern.dsl import context, dtypes, helion_configs
from tpukern.dsl import dims as d
from tpukern.dsl.config import Config
from tpukern.dsl.declaration import REQUIRED, Declaration, Parameter, unknown_keyword
from tpukern.dsl.frozen import FrozenMapping
from tpukern.dsl.helion_source import Source
from tpukern.dsl.roles import GridDim, Input, Output
from tpukern.dsl.signature import Signature
from tpukern.errors import ConfigError, LowerError, SignatureError, TpukernError
from tpukern.targets import Target

if TYPE_CHECKING:
    from tpukern.dsl.kernel import Kernel

_PRIMES: Final = (3, 5, 7, 11, 13, 17, 19, 23)  # times 128: sizes that tell dims apart
_MOST_CONFIGS: Final = 1024
_SMALLEST_BLOCKS: Final = (8, 16, 32, 64, 128, 256, 512)
RULE: Final = '"x: r d, w: d, i: r int32 -> y: r d, lse: r float32 saved"'


# --- declaration -----------------------------------------------------------------------------------------------------


def _operands(kernel: str, text: str) -> dict[str, tuple[str, str | None, bool]]:
    """Reads one side of a signature: name to (dims, dtype, saved)."""
    found: dict[str, tuple[str, str | None, bool]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, colon, rest = (piece.strip() for piece in part.partition(":"))
        if not colon or not name.isidentifier() or name in found:
            raise SignatureError(kernel, f"cannot read {part!r} in its signature", RULE)
        words, saved, dtype = rest, False, None
        if re.search(r"(^|\s)saved$", words):
            words, saved = words[:-5].rstrip(), True
        last = words.rpartition(" ")[2]
        if last in dtypes.KNOWN:
            words, dtype = words[: -len(last)].rstrip(), last
        found[name] = (words, dtype, saved)
    return found


def _is_tensor(parameter: inspect.Parameter) -> bool:
    note = parameter.annotation
    text = note if isinstance(note, str) else getattr(note, "__name__", str(note))
    bare = note is parameter.empty and parameter.default is parameter.empty
    return bare or text.strip("'\"").rpartition(".")[2] == "Tensor"


def declare(name: str, value: Any, *, signature: str | None, dtypes: tuple[str, ...], form: "HelionForm") -> Declaration:
    """Returns the declaration of a Helion function.

    Args:
        name: The kernel's name.
        value: The function, or a `helion.kernel`.
        signature: Dims of its inputs, and of its outputs after `->`; None to read them off the function.
        dtypes: What the call's element type may be.
        form: The kernel's form.

    Raises:
        SignatureError: The signature cannot be read, or does not fit the function.
    """
    function = helion_adapter.plain(value)
    parameters = inspect.signature(function).parameters
    left, arrow, right = (signature or "").partition("->")
    given = _operands(name, left)
    for wanted in given:
        if wanted not in parameters:
            raise SignatureError(name, f"its signature names {wanted!r}", f"parameters of the function, {list(parameters)}")
    tensors = tuple(given) if given else tuple(n for n, p in parameters.items() if _is_tensor(p))
    tensors = tuple(n for n in parameters if n in tensors)
    if not tensors:
        raise SignatureError(name, "no parameter is a tensor", "torch.Tensor annotations, or a signature=")
    source = Source(name, function, tensors)
    notes = _annotations(function)
    statics = {n: p.default for n, p in parameters.items() if n not in tensors}

    def declaration(inputs: Mapping[str, tuple[str, str | None, bool]], outputs: Sequence[Parameter]) -> Declaration:
        operands = (*(_input(name, n, *inputs[n][:2]) for n in tensors), *outputs)
        loops = source.loops({n: inputs[n][0] for n in tensors})
        known = {dim for o in operands for dim in o.names}
        walked = [dim for dim in dict.fromkeys((*loops.root, *loops.dims.values())) if dim in known]
        block = GridDim(_SMALLEST_BLOCKS, _SMALLEST_BLOCKS[0], None, each=False)
        return Declaration(
            kernel=name,
            operands=operands,
            dims=FrozenMapping(dict.fromkeys(walked, block)),
            choices=FrozenMapping(),
            statics=FrozenMapping(statics),
            static_types=FrozenMapping({n: _static_type(notes.get(n, Any)) for n in statics}),
            grid=tuple(dim for dim in loops.root if dim in walked),
            dtypes=dtypes,
            tile=False,
        )

    if arrow:
        return declaration(given, [_output(name, n, *said) for n, said in _operands(name, right).items()])
    if given:
        return declaration(given, form.inferred_outputs(declaration(given, ()), source.returned()))
    inputs = {n: (text, None, False) for n, text in source.dims().items()}
    try:
        outputs = form.inferred_outputs(declaration(inputs, ()), source.returned())
    except LowerError as error:  # sizes that it does not name have to be equal
        inputs = {n: (text, None, False) for n, text in source.dims(aligned=True).items()}
        try:
            outputs = form.inferred_outputs(declaration(inputs, ()), source.returned())
        except LowerError:
            raise error from error.__cause__
    return declaration(inputs, outputs)


def _annotations(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.get_annotations(function, eval_str=True)
    except (NameError, SyntaxError, AttributeError):  # names that only type checkers see
        return inspect.get_annotations(function)


def _static_type(note: Any) -> Any:
    """Returns the annotation of a static argument; `hl.constexpr` says nothing of its type."""
    return Any if "constexpr" in str(note).lower() else note


def _input(kernel: str, name: str, dims: str, dtype: str | None) -> Parameter:
    return Parameter(name, Input(dims, dtype, 0), d.parse(dims, kernel))


def _output(kernel: str, name: str, dims: str, dtype: str | None, saved: bool) -> Parameter:
    return Parameter(name, Output(dims, dtype, None, None, saved), d.parse(dims, kernel))


# --- the form --------------------------------------------------------------------------------------------------------


@final
class HelionForm:
    """What a Helion kernel has beyond a declaration.

    Attributes:
        value: The function or `helion.kernel`.
        blocks: Names of its block sizes in configs, without `block_`: those of its tile variables, `tile_` left out.
        given: The config that it was declared with, or None for Helion's default.
        settings: Helion's settings.
        declaration: The kernel's declaration.
    """

    def __init__(self, name: str, value: Any, *, config: Any, settings: Mapping[str, Any]) -> None:
        self.name, self.value, self.settings = name, value, dict(settings)
        self.function = helion_adapter.plain(value)
        self.given: dict[str, Any] | None = dict(config) if config is not None else helion_adapter.given_config(value)
        self.blocks: tuple[str, ...] = ()
        self.declaration: Declaration | None = None
        self._bound = functools.lru_cache(maxsize=256)(self._bind)
        self.least_blocks = functools.cache(self._least_blocks)
        self._made: dict[Target | None, Any] = {}

    def describe(self) -> str:
        """Returns what generated code depends on beside the function's source, for cache keys."""
        versions = [helion_adapter.installed() or "", _torch_version()]
        return repr((sorted(self.settings.items(), key=str), self.given, versions))

    def declared(self, signature: str | None, dtypes: tuple[str, ...]) -> Declaration:
        """Returns the kernel's declaration: see `declare`."""
        self.declaration = declare(self.name, self.value, signature=signature, dtypes=dtypes, form=self)
        self._order = tuple(inspect.signature(self.function).parameters)
        self._plain = self._order[: len(self.declaration.inputs)] == tuple(o.name for o in self.declaration.inputs)
        return self.declaration

    def arguments(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a call's inputs in declared order, and the rest by name: the function may be called as it is written."""
        assert self.declaration is not None
        inputs = self.declaration.inputs
        if self._plain and len(args) == len(inputs):
            return args, keywords
        named = {**dict(zip(self._order, args, strict=False)), **keywords}
        if len(args) > len(self._order) or any(o.name not in named for o in inputs):
            return args, keywords  # binding says what is wrong
        return tuple(named.pop(o.name) for o in inputs), named

    # --- from a signature to Helion's own object

    def form(self, signature: Signature, target: Target | None) -> helion_adapter.Form:
        """Returns the kernel bound to shapes by Helion, for a chip.

        Raises:
            ConfigError: Helion is missing.
            LowerError: Helion cannot express the function.
        """
        found = self._bound(signature, target)
        self._name_blocks(found)
        return found

    def _bind(self, signature: Signature, target: Target | None) -> helion_adapter.Form:
        if target not in self._made:
            assert self.declaration is not None
            self._made[target] = helion_adapter.make(self.name, self.value, tuple(self.declaration.statics), self.settings)
        specs = {o.name: _spec(self._shape(signature, o.name), o.dtype) for o in signature.inputs}
        return helion_adapter.bind(self.name, self._made[target], self._arguments(signature, specs), target)

    def _arguments(self, signature: Signature, tensors: Mapping[str, Any]) -> list[Any]:
        """Returns the function's arguments in order."""
        values = {**signature.statics, **tensors}
        return [values[name] for name in inspect.signature(self.function).parameters]

    def _shape(self, signature: Signature, name: str) -> tuple[int, ...]:
        """Returns the shape in which the function sees an operand: its leading axes as one."""
        assert self.declaration is not None
        operand = self.declaration.operand(name)
        assert operand is not None
        shape = next(o.shape for o in (*signature.inputs, *signature.outputs) if o.name == name)
        axes = operand.array_axes
        if axes and isinstance(axes[0], d.Named) and axes[0].leading:
            cut = len(shape) - len(axes) + 1
            return (math.prod(shape[:cut]), *shape[cut:])
        return shape

    def _name_blocks(self, form: helion_adapter.Form) -> None:
        names = [re.sub(r"^tile_?(?=.)", "", name).strip("_") for name, _, _ in form.blocks]
        if len(set(names)) == len(names) and all(name.isidentifier() or name.isdigit() for name in names):
            self.blocks = tuple(names)

    # --- configs

    def encode(self, config: Mapping[str, Any]) -> Config:
        return helion_configs.encode(config, self.blocks)

    def _checked(self, form: helion_adapter.Form, config: Mapping[str, Any]) -> Config:
        """Returns a config of ours with all that Helion adds to it."""
        return self.encode(form.normalized(helion_configs.decode(self.name, config, self.blocks)))

    def _start(self, form: helion_adapter.Form) -> Config:
        """Returns the declared config, blocks cut to what the sizes allow, or Helion's default."""
        default = form.default()
        if self.given is None:
            return self.encode(default)
        merged = {**default, **self.given}
        sizes = merged.get("block_sizes")
        if isinstance(sizes, list | tuple) and len(sizes) == len(form.blocks):
            merged["block_sizes"] = [
                max(low, min(size, high)) for size, (_, low, high) in zip(sizes, form.blocks, strict=True)
            ]
        return self.encode(form.normalized(merged))

    def resolve(
        self, kernel: "Kernel", signature: Signature, given: Mapping[str, Any], base: Config, target: Target | None
    ) -> Config:
        """Returns `base` with the keys of `given`, as Helion completes it.

        Raises:
            ConfigError: A key is none that the kernel has, or Helion or `reject` refuses the config.
        """
        if _is_empty(signature):
            return Config(base)
        form = self.form(signature, target)
        choices = self.choices(form)
        known = (*base, *(f"block_{name}" for name in self.blocks), *choices)
        for key, value in given.items():
            if key not in known:
                raise ConfigError(*unknown_keyword(self.name, key, tuple(dict.fromkeys((*self._statics, *known)))))
            if isinstance(value, str) and value not in choices.get(key, (value,)):
                raise ConfigError(self.name, f"{key} = {value!r}", f"one of {list(choices[key])}")
        config = self._checked(form, {**base, **given})
        reason = kernel.reject(config, signature, target) if kernel.reject else None
        if reason is not None:
            found = f"config {config} is rejected: {reason.rstrip('.')}"
            raise ConfigError(self.name, found, "another config", target=target.name if target else None)
        return config

    @property
    def _statics(self) -> tuple[str, ...]:
        assert self.declaration is not None
        return tuple(self.declaration.statics)

    def choices(self, form: helion_adapter.Form) -> dict[str, tuple[Any, ...]]:
        """Returns what Helion's autotuner would try for every key of our configs."""
        found: dict[str, tuple[Any, ...]] = {}
        for key, values in form.choices().items():
            entries = values if isinstance(values, list) else [values]
            for place, tried in enumerate(entries):
                for value in tried:
                    whole = [None] * len(entries) if isinstance(values, list) else value
                    if isinstance(values, list):
                        whole[place] = value
                    encoded = self.encode({key: whole})
                    names = [list(encoded)[place]] if isinstance(values, list) else list(encoded)
                    for name in names:
                        found[name] = tuple(dict.fromkeys((*found.get(name, ()), encoded[name])))
        return found

    def default(self, kernel: "Kernel", signature: Signature, target: Target | None) -> Config:
        """Returns the declared config, or Helion's default; for a target with blocks halved until the VMEM estimate fits."""
        if _is_empty(signature):
            return Config()
        form = self.form(signature, target)
        config = self._start(form)
        if target is None or self.given is not None:
            return config
        limit = min(kernel.vmem_limit_bytes or target.vmem_bytes, target.vmem_bytes)
        least = {f"block_{name}": low for name, (_, low, _) in zip(self.blocks, form.blocks, strict=False)}
        while self.vmem_bytes(kernel, signature, config, target) > limit:
            larger = [key for key, low in least.items() if key in config and config[key] > low]
            if not larger:
                break
            key = max(larger, key=lambda name: config[name])
            config = self._checked(form, {**config, key: config[key] // 2})
        return config

    def vmem_bytes(self, kernel: "Kernel", signature: Signature, config: Config, target: Target) -> int:
        from tpukern.dsl import ir  # only choosing for a chip needs it

        function, specs = self.build(kernel, signature, config), [_spec(o.shape, o.dtype) for o in signature.inputs]
        with context.entered(context.Context(target=target, interpret=False)):
            calls = ir.calls_of(function, *specs, target=target)
        return max((call.vmem_estimate_bytes for call in calls), default=0)

    def largest(self, signature: Signature) -> Config:
        """Returns the config of the largest blocks, for interpret form."""
        if _is_empty(signature):
            return Config()
        form = self.form(signature, None)
        start = self._start(form)
        blocks = {f"block_{name}": high for name, (_, _, high) in zip(self.blocks, form.blocks, strict=False)}
        try:
            return self._checked(form, {**start, **{key: size for key, size in blocks.items() if key in start}})
        except ConfigError:
            return start

    def configs(self, kernel: "Kernel", signature: Signature, target: Target | None) -> tuple[Config, ...]:
        """Returns the distinct configs that Helion's autotuner would try, of every two keys but not of all together.

        Block sizes and the kind of inner loop are combined in full; the other keys are varied one at a time.
        """
        if _is_empty(signature):
            return (Config(),)
        form = self.form(signature, target)
        start, choices = self._start(form), self.choices(form)
        full = [key for key in choices if key in start and (key.startswith("block_") or key == "pallas_loop_type")]
        product = [dict(zip(full, values, strict=True)) for values in itertools.product(*(choices[key] for key in full))]
        single = [{key: value} for key, values in choices.items() if key not in full for value in values]
        found: dict[Config, None] = {start: None}
        for changed in itertools.islice((*single, *product), _MOST_CONFIGS):
            try:
                found[self.resolve(kernel, signature, {}, Config({**start, **changed}), target)] = None
            except ConfigError:
                continue
        return tuple(found)

    def drawn(self, signature: Signature, form_of: str, rng: np.random.Generator) -> Config:
        """Returns a config for a test: `smallest` blocks, `largest`, or any (`drawn`)."""
        if _is_empty(signature):
            return Config()
        if form_of == "largest":
            return self.largest(signature)
        form = self.form(signature, None)
        start, choices = self._start(form), self.choices(form)
        config = start
        for key in sorted(choices, key=lambda key: not key.startswith("block_")):
            values = choices[key]
            if key.startswith("block_"):
                value = values[0] if form_of == "smallest" else values[int(rng.integers(len(values)))]
            elif form_of == "drawn" and key in start:
                value = values[int(rng.integers(len(values)))]
            else:
                continue
            with contextlib.suppress(ConfigError):  # of the other values, some go with no such block
                config = self._checked(form, {**config, key: value})
        return config

    def _least_blocks(self) -> dict[str, int]:
        """Returns for every dim that is walked by a loop the least block, at sizes where the dims do not limit it."""
        assert self.declaration is not None
        k = self.declaration
        from tpukern.dsl.signature import bind

        for factor in (128, 64):
            names = [n for n in dict.fromkeys(n for o in k.inputs for n in o.names) if n not in k.int_statics]
            sizes = dict.fromkeys(names, factor * 8)
            try:
                form = self.form(_signature(k, sizes, bind), None)
            except (TpukernError, KeyError):
                continue
            lows = {name: low for name, (_, low, _) in zip(self.blocks, form.blocks, strict=False)}
            return {dim: lows[dim] for dim in k.dims if dim in lows}
        return {}

    # --- building

    def build(self, kernel: "Kernel", signature: Signature, config: Config) -> Callable[..., tuple[jax.Array, ...]]:
        """Returns the JAX callable: inputs in declared order to the tuple of outputs.

        Raises:
            SignatureError: An input is empty and an output is not.
        """
        if _is_empty(signature):
            return _nothing(signature)
        names = [o.name for o in signature.inputs]
        helions = helion_configs.decode(self.name, config, self.blocks)

        def call(*arrays: Any) -> tuple[jax.Array, ...]:
            now = context.current()
            shaped = {
                name: jnp.reshape(array, self._shape(signature, name)) for name, array in zip(names, arrays, strict=True)
            }
            form = self.form(signature, now.target)
            arguments = self._arguments(signature, shaped)
            results = form.run(helions, arguments, now.interpreted, now.target, kernel.vmem_limit_bytes)
            return self._results(signature, results)

        return call

    def _results(self, signature: Signature, results: Sequence[Any]) -> tuple[jax.Array, ...]:
        if len(results) != len(signature.outputs):
            wanted = ", ".join(map(str, signature.outputs))
            raise SignatureError(
                self.name, f"the function returns {len(results)} tensors", f"{len(signature.outputs)}: {wanted}"
            )
        for o, result in zip(signature.outputs, results, strict=True):
            if result.shape != self._shape(signature, o.name):
                found = f"the function returns {o.name} of shape {tuple(result.shape)}"
                raise SignatureError(self.name, found, f"{self._shape(signature, o.name)}, as the signature says")
        return tuple(
            jnp.reshape(result, o.shape).astype(o.dtype) for o, result in zip(signature.outputs, results, strict=True)
        )

    def source(self, signature: Signature, config: Config, target: Target | None) -> str:
        """Returns the Python that Helion generates for a config."""
        form = self.form(signature, target)
        return form.source(helion_configs.decode(self.name, config, self.blocks), target)

    # --- outputs that nobody declared

    def inferred_outputs(self, inputs: Declaration, names: Sequence[str | None]) -> list[Parameter]:
        """Returns the outputs, from one run of the generated code on shapes alone.

        Raises:
            SignatureError: A size of an output is no dim, product of dims or 1.
        """
        from tpukern.dsl.signature import bind

        self.declaration = inputs
        wanted = [n for n in dict.fromkeys(n for o in inputs.inputs for n in o.names) if n not in inputs.int_statics]
        sizes = {name: 128 * prime for name, prime in zip(wanted, _PRIMES, strict=False)}
        signature = _signature(inputs, sizes, bind)
        form = self.form(signature, None)
        config = helion_configs.decode(self.name, self._start(form), self.blocks)
        specs = [_spec(self._shape(signature, o.name), o.dtype) for o in signature.inputs]

        def run(*arrays: Any) -> tuple[Any, ...]:
            shaped = dict(zip((o.name for o in signature.inputs), arrays, strict=True))
            return form.run(config, self._arguments(signature, shaped), True, None, None)

        results = jax.eval_shape(run, *specs)
        known = {size: name for name, size in signature.sizes.items()}
        taken = {o.name for o in inputs.inputs}
        found = []
        for place, result in enumerate(results):
            name = names[place] if place < len(names) and names[place] else f"out{place if len(results) > 1 else ''}"
            name = str(name) if name not in taken else f"{name}_out"
            taken.add(name)
            text = " ".join(self._axis(name, size, known) for size in result.shape)
            dtype = None if str(result.dtype) == signature.dtype else str(result.dtype)
            found.append(_output(self.name, name, text, dtype, False))
        return found

    def _axis(self, output: str, size: int, known: Mapping[int, str]) -> str:
        if size in known:
            return known[size]
        for a, b in itertools.permutations(known, 2):
            if a * b == size:
                return f"({known[a]} {known[b]})"
        if size == 1 or not known:  # without dims all sizes are given, and so are the results'
            return str(size)
        found = f"an axis of {output} has size {size} when {', '.join(f'{n} is {s}' for s, n in known.items())}"
        raise SignatureError(self.name, found, f"a signature= that says what it is, such as {RULE}")


def _signature(k: Declaration, sizes: Mapping[str, int], bind: Callable[..., Signature]) -> Signature:
    from tpukern.dsl.signature import shape_of

    values = {**sizes, **{n: k.statics[n] for n in k.int_statics if k.statics[n] is not REQUIRED}}
    dtype = "bfloat16" if "bfloat16" in k.dtypes or not k.dtypes else k.dtypes[0]
    specs = [_spec(shape_of(o, values, None), o.role.dtype or dtype) for o in k.inputs]
    return bind(k, specs, {}, {})


def _spec(shape: Sequence[int], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def _torch_version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _is_empty(signature: Signature) -> bool:
    return any(0 in o.shape for o in (*signature.inputs, *signature.outputs))


def _nothing(signature: Signature) -> Callable[..., tuple[jax.Array, ...]]:
    full = [o for o in signature.outputs if math.prod(o.shape)]
    if full:
        empty = next(o for o in signature.inputs if not math.prod(o.shape))
        found = f"{empty} is empty and output {full[0].name} is not"
        raise SignatureError(signature.kernel, found, "the reference to be called", "Zero-size sums never reach the kernel.")
    return lambda *arrays: tuple(jnp.zeros(o.shape, o.dtype) for o in signature.outputs)
