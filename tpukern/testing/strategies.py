"""What a kernel is tried on, derived from its declaration: sizes, statics, configs and values.

Compiling a shape costs a thousand times what running it does. So a run draws a few `Point`s (sizes, element type, static
arguments, configs), each of which is compiled once, and many `Case`s (value classes and a seed) on every point.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

import numpy as np

from tpukern.dsl import Config, Kernel, Signature, Workload
from tpukern.dsl import dims as d
from tpukern.dsl.declaration import REQUIRED, Declaration, Parameter
from tpukern.dsl.frozen import FrozenMapping
from tpukern.dsl.gradient import differentiable
from tpukern.dsl.rules import order_breach
from tpukern.errors import ConfigError, LowerError, ParityError, SignatureError
from tpukern.testing.values import dtype_named, kinds, values

try:
    import hypothesis.strategies as st
except ImportError as error:
    raise ParityError("verify", "hypothesis is not installed", do="Run: pip install 'tpukern[verify]'.") from error

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_WHOLE: Final = (1, 64, 37, 128, 8, 130)  # sizes of dims that are never cut into blocks
_EACH: Final = (1, 2, 1, 3)  # and of those walked one position a step
_VOLUME: Final = 2**22  # of the dims that the grid walks
_INSTANCES: Final = 4  # of the dims walked one position a step
_TRIES: Final = 24
_NOTHING: Final[FrozenMapping[Any]] = FrozenMapping()
_DEFAULT: Final = Config()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """What is compiled once.

    Attributes:
        dtype: The element type that operands share.
        sizes: Size of every dim of the inputs; a tuple for the leading axes.
        statics: Static arguments that differ from their default.
        forward: Config of the kernel.
        backward: Config of its gradient, if it has one.
    """

    dtype: str
    sizes: FrozenMapping[Any]
    statics: FrozenMapping[Any] = _NOTHING
    forward: Config = _DEFAULT
    backward: Config = _DEFAULT

    def signature(self, kernel: Kernel) -> Signature:
        """Returns the signature of the call."""
        return kernel.workload_signature(Workload("case", dtype=self.dtype, **{**self.sizes, **self.statics}))

    @property
    def empty(self) -> bool:
        """Whether a dim has no element."""
        return any(0 in (size if isinstance(size, tuple) else (size,)) for size in self.sizes.values())

    def __str__(self) -> str:
        parts = [self.dtype, *(f"{name}={value}" for name, value in {**self.sizes, **self.statics}.items())]
        return ", ".join(parts) + "".join(f"; {text}" for text in (str(self.forward), str(self.backward)) if text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One input of one point.

    Attributes:
        point: Shapes, statics and configs.
        kinds: Value class of each input and cotangent (`d<out>`) that is not `normal`.
        seed: What the values are drawn from.
    """

    point: Point
    kinds: FrozenMapping[str] = _NOTHING
    seed: int = 0

    def inputs(self, kernel: Kernel) -> tuple[np.ndarray, ...]:
        """Returns the inputs in declared order."""
        signature = self.point.signature(kernel)
        return tuple(self._array(kernel, signature, at, o) for at, o in enumerate(signature.inputs))

    def cotangents(self, kernel: Kernel) -> dict[str, np.ndarray]:
        """Returns what is fed to the gradient, by output."""
        signature = self.point.signature(kernel)
        wanted = [o for o in signature.outputs if o.name not in signature.saved]
        return {o.name: self._of(f"d{o.name}", o, 100 + at) for at, o in enumerate(wanted)}

    def _array(self, kernel: Kernel, signature: Signature, at: int, o: Any) -> np.ndarray:
        drawn = kernel.adopted.draw.get(o.name) if kernel.adopted is not None else None
        if drawn is not None:
            return np.asarray(drawn(np.random.default_rng([self.seed, at]), signature)).astype(dtype_named(o.dtype))
        bound = index_bound(kernel.declaration, signature, o.name)
        if bound is None:
            return self._of(o.name, o, at)
        rng = np.random.default_rng([self.seed, at])
        return rng.integers(0, max(1, bound), o.shape).astype(dtype_named(o.dtype))

    def _of(self, name: str, o: Any, at: int) -> np.ndarray:
        return values(self.kinds.get(name, "normal"), o.shape, o.dtype, [self.seed, at])

    def __str__(self) -> str:
        drawn = ", ".join(f"{name} {kind}" for name, kind in self.kinds.items() if kind != "normal") or "normal values"
        return f"{self.point}; {drawn}; seed {self.seed}"


def operand_kinds(kernel: Kernel, dtype: str) -> dict[str, tuple[str, ...]]:
    """Returns the value classes of each input and, if there is a gradient, of each cotangent; none for indices."""
    k = kernel.declaration
    found = {}
    for o in k.inputs:
        if not _is_integer(o):
            found[o.name] = kinds(o.role.dtype or dtype)
    if kernel.gradient is not None:
        for o in k.outputs:
            if not getattr(o.role, "saved", False):
                found[f"d{o.name}"] = kinds(o.role.dtype or dtype)
    return found


def _is_integer(o: Parameter) -> bool:
    return bool(o.role.dtype) and bool(np.issubdtype(dtype_named(o.role.dtype), np.integer))


def index_bound(k: Declaration, signature: Signature, name: str) -> int | None:
    """Returns what an integer input has to stay below, since it counts or points into something; None for other inputs.

    An entry of a table that an axis is looked up in is a block of that axis. Any other integer input is taken to point into
    the smallest of the dims that it does not have itself.
    """
    operand = k.operand(name)
    if operand is None or not _is_integer(operand):
        return None
    looked_up = [axis.name for _, axis in k.lookups if axis.table == name]
    if looked_up:
        blocks = [k.dims[dim] for dim in looked_up]
        return min(-(-signature.sizes[n] // max((*b.choices, 1))) for n, b in zip(looked_up, blocks, strict=True))
    other = {n for o in k.inputs if not _is_integer(o) for n in o.names} - set(operand.names)
    return min((signature.sizes[n] for n in other), default=2)


# --- sizes


def borders(block: int) -> tuple[int, ...]:
    """Returns sizes round the borders of a block: one, a block, a little less and more, several blocks, and a prime number."""
    return 1, block + 1, _prime(2 * block + block // 8), block - 1 or 2, block, 2 * block


def _prime(above: int) -> int:
    return next(n for n in itertools.count(above + 1) if all(n % m for m in range(2, math.isqrt(n) + 1)))


def _choices_of(kernel: Kernel, name: str) -> tuple[int, ...]:
    k = kernel.declaration
    if kernel.adopted is not None and (allowed := kernel.adopted.sizes_of(name)):
        return (allowed * 3)[:6]
    if name not in k.dims:
        return _WHOLE
    if kernel.helion is not None:
        return borders(kernel.helion.least_blocks().get(name, min(k.dims[name].choices)))
    return _EACH if k.dims[name].each else borders(min(k.dims[name].choices))


def sizes(kernel: Kernel, turn: int, rng: np.random.Generator) -> dict[str, Any]:
    """Returns sizes for every dim of the inputs.

    Turn 0 is the smallest call, turn 1 has several blocks and a tail everywhere, turn 2 just more than a block; later ones
    walk every dim over its borders, each in an order of its own.
    """
    k = kernel.declaration
    names = [n for n in dict.fromkeys(n for o in k.inputs for n in o.names) if n not in k.int_statics]
    found: dict[str, int] = {}
    for at, name in enumerate(names):
        choices = _choices_of(kernel, name)
        if turn <= 2:
            found[name] = choices[(0, 2, 1)[turn]] if name in k.blocks else choices[min(turn, 1)]
        else:
            found[name] = choices[(turn + at * (1 + turn // len(choices))) % len(choices)]
    _shrunk_to_fit(k, found)
    if k.star is not None and k.star in found:
        return {**found, k.star: _leading(found[k.star], int(rng.integers(3)) if turn > 2 else 0)}
    return found


def _shrunk_to_fit(k: Declaration, found: dict[str, int]) -> None:
    """Makes the largest dims smaller until a float64 reference is cheap."""
    each = [n for n in found if n in k.dims and k.dims[n].each]
    while math.prod(found[n] for n in each) > _INSTANCES:
        found[max(each, key=lambda n: found[n])] -= 1
    walked = [n for n in found if n in k.dims]
    while math.prod(max(1, found[n]) for n in walked) > _VOLUME:
        largest = max(walked, key=lambda n: found[n])
        found[largest] = found[largest] * 2 // 3


def _leading(rows: int, form: int) -> tuple[int, ...]:
    """Returns leading axes of so many elements: one axis, two, or none if there is one element."""
    if form == 1 and rows == 1:
        return ()
    divisor = next((n for n in (2, 3, 5, 7) if rows % n == 0 and rows > n), 1)
    return (rows,) if form != 2 else (divisor, rows // divisor)


def empty_sizes(kernel: Kernel, rng: np.random.Generator) -> dict[str, Any]:
    """Returns sizes of which one is 0, if the kernel takes such a size of any dim."""
    k, found = kernel.declaration, sizes(kernel, 0, rng)
    ruled = kernel.adopted.sizes if kernel.adopted is not None else ()
    free = [n for n in found if n not in k.int_statics and n not in ruled]
    if not free:
        return found
    name = str(rng.choice(free))
    return {**found, name: (0,) if isinstance(found[name], tuple) else 0}


# --- static arguments and configs


def statics(kernel: Kernel) -> dict[str, tuple[Any, ...]]:
    """Returns the values that each static argument is tried at, its default first."""
    k, found = kernel.declaration, {}
    for name, default in k.statics.items():
        used = [w.values[name] for w in kernel.workloads if name in w.values]
        known = [] if default is REQUIRED else [default]
        known += _literals(k.static_types[name])
        if isinstance(default, bool) or k.static_types[name] is bool:
            known += [False, True]
        elif isinstance(default, float):
            known += [default * 8, 1.0] if default else [0.5]
        elif default is None and "float" in str(k.static_types[name]):
            known += [1.0, 0.25]
        found[name] = tuple(dict.fromkeys((*known, *used)))
    return {name: tried for name, tried in found.items() if tried}


def _literals(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in _literals(part)]


def drawn_config(kernel: Kernel, signature: Signature, form: str, rng: np.random.Generator) -> Config:
    """Returns a legal config.

    Args:
        kernel: The kernel.
        signature: The call.
        form: `smallest` blocks, `largest`, or any (`drawn`, which may also reorder the grid).
        rng: What is drawn from.

    Raises:
        ConfigError: No config was found.
        LowerError: The same, for Mosaic's sake.
    """
    for turn in range(_TRIES):
        config = _config(kernel, (signature,), form if turn == 0 else "drawn", rng)
        try:
            return kernel.bind_signature(signature, config).config
        except (ConfigError, LowerError):
            continue
    return kernel.bind_signature(signature).config


def _config(kernel: Kernel, signatures: tuple[Signature, ...], form: str, rng: np.random.Generator) -> Config:
    if kernel.helion is not None:
        return kernel.helion.drawn(signatures[0], form, rng)
    k = kernel.declaration
    pick = {"smallest": min, "largest": max}.get(form, lambda choices: int(rng.choice(choices)))
    found: dict[str, Any] = {f"block_{name}": pick(k.dims[name].choices) for name in k.blocks}
    for name, tunable in k.choices.items():
        found[name] = tunable.choices[int(rng.integers(len(tunable.choices)))] if form == "drawn" else tunable.default
    if form == "drawn" and kernel.is_tile and len(k.grid) > 1:
        order = tuple(str(n) for n in rng.permutation(k.grid))
        if order_breach(k, order) is None:
            found["order"] = " ".join(order)
    for call in kernel.calls(signatures):
        found |= call.free(_config(call.kernel, call.signatures, form, rng))
    return Config(found)


def with_configs(kernel: Kernel, point: Point, form: str, rng: np.random.Generator) -> Point:
    """Returns a point with configs drawn for it."""
    if point.empty:
        return point
    signature = point.signature(kernel)
    forward = drawn_config(kernel, signature, form, rng)
    if kernel.gradient is None:
        return dataclasses.replace(point, forward=forward, backward=Config())
    try:
        backward = drawn_config(kernel.gradient, kernel.gradient_signature(signature), form, rng)
    except SignatureError:
        backward = Config()
    return dataclasses.replace(point, forward=forward, backward=backward)


def points(kernel: Kernel, count: int, seed: int) -> list[Point]:
    """Returns the points of a run: for each element type `count` of them and one with a dim of size 0, smallest first.

    They have more than `rich` and `just_above` in common with every other run: one element of everything.
    """
    found: dict[Point, None] = dict.fromkeys((*rich(kernel, seed), *just_above(kernel, seed)))
    tried = statics(kernel)
    for offset, dtype in enumerate(kernel.dtypes or ("float32",)):
        rng = np.random.default_rng([seed, offset])
        for turn in (0, *range(3, count)):
            at = turn if turn <= 2 else 3 + int(rng.integers(1000))
            form = "largest" if turn == 0 else str(rng.choice(_FORMS))
            chosen = {name: options[(turn + offset) % len(options)] for name, options in tried.items()}
            point = Point(
                dtype=dtype, sizes=FrozenMapping(sizes(kernel, at, rng)), statics=FrozenMapping(_changed(kernel, chosen))
            )
            found[with_configs(kernel, point, form, rng)] = None
        found[Point(dtype=dtype, sizes=FrozenMapping(empty_sizes(kernel, rng)))] = None
    return sorted(found, key=lambda p: (p.empty, math.prod(_flat(p.sizes))))


_FORMS: Final = ("smallest", "drawn", "drawn", "largest")


def _of_turn(kernel: Kernel, turn: int, seed: int) -> list[Point]:
    """Returns for each element type the point of a turn of `sizes`, in the smallest blocks."""
    found, tried = [], statics(kernel)
    for offset, dtype in enumerate(kernel.dtypes or ("float32",)):
        rng = np.random.default_rng([seed, offset, turn])
        chosen = {name: options[(seed + turn + offset) % len(options)] for name, options in tried.items()}
        point = Point(
            dtype=dtype, sizes=FrozenMapping(sizes(kernel, turn, rng)), statics=FrozenMapping(_changed(kernel, chosen))
        )
        found.append(with_configs(kernel, point, "smallest", rng))
    return found


def least(kernel: Kernel, seed: int) -> list[Point]:
    """Returns for each element type the smallest point: one element along every dim."""
    return _of_turn(kernel, 0, seed)


def rich(kernel: Kernel, seed: int) -> list[Point]:
    """Returns for each element type a point with several blocks and a tail along every dim."""
    return _of_turn(kernel, 1, seed)


def just_above(kernel: Kernel, seed: int) -> list[Point]:
    """Returns for each element type a point with a little more than a block along every dim."""
    return _of_turn(kernel, 2, seed)


def _changed(kernel: Kernel, chosen: Mapping[str, Any]) -> dict[str, Any]:
    defaults = kernel.declaration.statics
    return {n: v for n, v in chosen.items() if defaults[n] is REQUIRED or type(v) is not type(defaults[n]) or v != defaults[n]}


def _flat(found: Mapping[str, Any]) -> Iterator[int]:
    for size in found.values():
        yield from size if isinstance(size, tuple) else (size,)


# --- cases


def cases(kernel: Kernel, among: Sequence[Point]) -> "SearchStrategy[Case]":
    """Returns a Hypothesis strategy: a point, value classes and a seed.

    Half of the cases have one operand of a special class, the others draw a class for every operand.
    """
    by_dtype = {point.dtype: operand_kinds(kernel, point.dtype) for point in among}

    @st.composite
    def case(draw: Any) -> Case:
        point = draw(st.sampled_from(list(among)))
        options: dict[str, tuple[str, ...]] = by_dtype[point.dtype]
        drawn: dict[str, str] = {}
        mixed: bool = draw(st.booleans())
        if options and mixed:
            drawn = {name: draw(st.sampled_from(classes)) for name, classes in options.items()}
        elif options:
            name = draw(st.sampled_from(list(options)))
            drawn = {name: draw(st.sampled_from(options[name]))}
        special = {name: kind for name, kind in drawn.items() if kind != "normal"}
        return Case(point=point, kinds=FrozenMapping(special), seed=draw(st.integers(0, 2**32 - 1)))

    return case()


def differentiated(kernel: Kernel) -> tuple[str, ...]:
    """Returns the inputs that the kernel gives a gradient for."""
    if kernel.gradient is None:
        return ()
    given = {o.name[1:] for o in kernel.gradient.declaration.outputs}
    return tuple(o.name for o in differentiable(kernel.declaration) if o.name in given)


def batch_dims(kernel: Kernel) -> tuple[str, ...]:
    """Returns the dims that split a call into independent ones: every output of the kernel has them, none is summed over."""
    k = kernel.declaration
    outputs = [set(o.names) for o in k.outputs]
    return tuple(n for n in k.grid if all(n in names for names in outputs))


def axis_of(o: Parameter, name: str, signature: Signature) -> tuple[slice, tuple[int, ...]] | None:
    """Returns where a dim lies in an operand's array: its axes, and the sizes that they split into; None if it has none."""
    at = 0
    for axis in o.array_axes:
        width = 1
        parts: tuple[int, ...] = ()
        if isinstance(axis, d.Named) and axis.leading:
            width = len(signature.leading or ())
        elif isinstance(axis, d.Group):
            parts = tuple(signature.sizes[n] for n in axis.names)
        if name in d.names_of(axis):
            return slice(at, at + width), parts
        at += width
    return None
