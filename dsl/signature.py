"""What one call looks like: sizes, element type and statics, bound from the operands' shapes by the dims strings."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from tpukern.dsl import dims as d
from tpukern.dsl import dtypes
from tpukern.dsl.declaration import REQUIRED, Declaration, Parameter, each_output, unknown_keyword
from tpukern.dsl.frozen import FrozenMapping
from tpukern.errors import ConfigError, SignatureError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Operand:
    """One array of a call.

    Attributes:
        name: Its parameter.
        shape: As the caller sees it.
        dtype: Name of its element type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """One way of calling a kernel.

    Attributes:
        kernel: The kernel's name.
        sizes: Size of every dim.
        leading: The leading axes that `*` stands for, or None if the kernel has no `*`.
        dtype: The element type that operands without a type of their own share; None if there is no such operand.
        statics: Value of every static argument.
        inputs: The operands that the caller passes.
        outputs: What the call returns.
        saved: Names of the outputs that are only kept for the backward pass.
    """

    kernel: str
    sizes: FrozenMapping[int]
    leading: tuple[int, ...] | None
    dtype: str | None
    statics: FrozenMapping[Any]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    saved: tuple[str, ...] = ()

    def __str__(self) -> str:
        statics = "".join(f", {name}={_shown(value)}" for name, value in self.statics.items())
        return f"{self.kernel}({', '.join(map(str, self.inputs))}{statics}) -> {', '.join(map(str, self.outputs))}"


def _shown(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)


def bind(
    declaration: Declaration, arrays: Sequence[Any], statics: Mapping[str, Any], casts: Mapping[str, str | None]
) -> Signature:
    """Binds the operands of a call to the dims that they were declared with.

    Args:
        declaration: The kernel's.
        arrays: One for each input, in order; anything with `shape` and `dtype`.
        statics: Static arguments of the call.
        casts: Element types of outputs that are returned in another type than they were declared with (None: the call's).

    Raises:
        SignatureError: The arrays do not fit the declaration.
        ConfigError: A static argument is unknown or missing.
    """
    k = declaration
    if len(arrays) != len(k.inputs):
        wanted = ", ".join(map(str, k.inputs))
        raise SignatureError(k.kernel, f"{len(arrays)} arrays", f"{len(k.inputs)}: {wanted}")
    values = bind_statics(k, statics)
    specs = [_spec(k, o, a) for o, a in zip(k.inputs, arrays, strict=True)]
    element = _element_type(k, specs)
    sizes, leading = _Sizes(k, values).bind([(o, shape) for o, shape, _ in specs])
    outputs = []
    for o, role in each_output(k):
        dtype = casts.get(o.name, role.dtype) or element
        if dtype is None:
            raise SignatureError(k.kernel, f"output {o} has no dtype and no input shares one", "a dtype of its own")
        outputs.append(Operand(o.name, shape_of(o, sizes, leading), dtype))
    return Signature(
        kernel=k.kernel,
        sizes=FrozenMapping(sizes),
        leading=leading,
        dtype=element,
        statics=values,
        inputs=tuple(Operand(o.name, shape, dtype) for o, shape, dtype in specs),
        outputs=tuple(outputs),
        saved=tuple(o.name for o, role in each_output(k) if role.saved),
    )


def _spec(k: Declaration, o: Parameter, array: Any) -> tuple[Parameter, tuple[int, ...], str]:
    try:
        return o, tuple(array.shape), dtypes.name(array.dtype)
    except AttributeError as error:
        raise SignatureError(k.kernel, f"{o.name} is a {type(array).__name__}", "an array") from error


def bind_statics(k: Declaration, given: Mapping[str, Any]) -> FrozenMapping[Any]:
    """Returns the value of every static argument.

    Raises:
        ConfigError: One is unknown, missing, not hashable or none of its `Literal`s.
    """
    for name, value in given.items():
        if name not in k.statics:
            raise ConfigError(*unknown_keyword(k.kernel, name, (*k.statics, *k.keys), ("order",)))
        try:
            hash(value)
        except TypeError as error:
            found = f"static argument {name!r} is a {type(value).__name__}, which has no hash"
            raise ConfigError(k.kernel, found, "a value that can be a dictionary key") from error
        kind = k.static_types.get(name)
        if get_origin(kind) is Literal and value not in (known := get_args(kind)):
            do = did_you_mean(str(value), map(str, known))
            raise ConfigError(k.kernel, f"{name} = {value!r}", f"one of {list(known)}", do)
    missing = [name for name, default in k.statics.items() if default is REQUIRED and name not in given]
    if missing:
        raise ConfigError(k.kernel, f"no value for {missing[0]!r}", "one, since it has no default")
    return FrozenMapping({**k.statics, **given})


def shape_of(o: Parameter, sizes: Mapping[str, int], leading: tuple[int, ...] | None) -> tuple[int, ...]:
    """Returns the shape of the caller's array for these sizes."""
    shape: list[int] = []
    for axis in o.array_axes:
        if isinstance(axis, d.Named) and axis.leading and leading is not None:
            shape.extend(leading)
        else:
            shape.append(axis_size(axis, sizes))
    return tuple(shape)


def axis_size(axis: d.Axis, sizes: Mapping[str, int]) -> int:
    """Returns the size of one axis (of all leading ones, taken as one, for `*`)."""
    if isinstance(axis, d.Exact):
        return axis.size
    if isinstance(axis, d.Per):
        return -(-sizes[axis.name] // axis.per)
    return math.prod(sizes[name] for name in d.names_of(axis))


def _element_type(k: Declaration, specs: Sequence[tuple[Parameter, tuple[int, ...], str]]) -> str | None:
    first: tuple[str, str] | None = None
    for o, _, dtype in specs:
        if o.role.dtype is not None:
            if dtype != o.role.dtype:
                raise SignatureError(k.kernel, f"{o.name} has dtype {dtype}", o.role.dtype)
        elif first is None:
            if k.dtypes and dtype not in k.dtypes:
                raise SignatureError(k.kernel, f"{o.name} has dtype {dtype}", f"one of {list(k.dtypes)}")
            first = (o.name, dtype)
        elif dtype != first[1]:
            found = f"{o.name} has dtype {dtype} but {first[0]} has {first[1]}"
            raise SignatureError(k.kernel, found, "one element type", f"Cast one, or give {o.name} a dtype of its own.")
    return first[1] if first else None


class _Sizes:
    """Binds dims to sizes, remembering who said so."""

    def __init__(self, k: Declaration, statics: Mapping[str, Any]) -> None:
        self.k = k
        self.sizes: dict[str, int] = {}
        self.told_by: dict[str, str] = {}
        self.leading: tuple[int, ...] | None = None
        self.later: list[tuple[Parameter, d.Group | d.Per, int]] = []
        used = {name for o in k.operands for name in o.names}
        for name in k.int_statics:
            if name in used and isinstance(statics[name], int):
                self.tell(name, statics[name], f"static argument {name}")

    def bind(self, arrays: Sequence[tuple[Parameter, tuple[int, ...]]]) -> tuple[dict[str, int], tuple[int, ...] | None]:
        for o, shape in arrays:
            self.operand(o, shape)
        while self.later:
            left = [entry for entry in self.later if not self.solve(*entry)]
            assert len(left) < len(self.later), "rules._sizes lets only declarations pass whose groups can be solved"
            self.later = left
        return self.sizes, self.leading

    def operand(self, o: Parameter, shape: tuple[int, ...]) -> None:
        axes = o.array_axes
        star = bool(axes) and isinstance(axes[0], d.Named) and axes[0].leading
        if len(shape) < len(axes) - 1 if star else len(shape) != len(axes):
            found = f"{o.name} has shape {shape}, rank {len(shape)}"
            if not axes:
                raise SignatureError(self.k.kernel, found, "a scalar, rank 0")
            rank = f"rank {len(axes) - 1} or more" if star else f"rank {len(axes)}"
            raise SignatureError(self.k.kernel, found, f'"{o.role.dims}", {rank}')
        if star:
            cut = len(shape) - len(axes) + 1
            self.lead(o, axes[0].name, shape[:cut])  # type: ignore[union-attr]
            axes, shape = axes[1:], shape[cut:]
        for axis, size in zip(axes, shape, strict=True):
            if isinstance(axis, d.Named | d.Lookup):
                self.tell(axis.name, size, str(o))
            elif isinstance(axis, d.Exact):
                if size != axis.size:
                    raise SignatureError(self.k.kernel, f"axis {axis} of {o.name} has size {size}", f"exactly {axis.size}")
            else:
                self.later.append((o, axis, size))

    def lead(self, o: Parameter, name: str, leading: tuple[int, ...]) -> None:
        if self.leading is None:
            self.leading = leading
            self.tell(name, math.prod(leading), str(o))
        elif self.leading != leading:
            found = f"leading axes {leading} of {o}"
            raise SignatureError(self.k.kernel, found, f"{self.leading} as in the other operands")

    def tell(self, name: str, size: int, who: str) -> None:
        known = self.sizes.setdefault(name, size)
        if known != size:
            raise SignatureError(
                self.k.kernel, f"dim {name!r} is {size} on {who} but {known} on {self.told_by[name]}", "one size"
            )
        self.told_by.setdefault(name, who)

    def solve(self, o: Parameter, axis: d.Group | d.Per, size: int) -> bool:
        """Uses what a group or a `k/128` axis says, if enough is known; returns whether it was."""
        if isinstance(axis, d.Per):
            if axis.name not in self.sizes:
                return False
            wanted = axis_size(axis, self.sizes)
            if size != wanted:
                found = f"axis {axis} of {o.name} has size {size}"
                raise SignatureError(self.k.kernel, found, f"{wanted}, since {axis.name} is {self.sizes[axis.name]}")
            return True
        unknown = [name for name in axis.names if name not in self.sizes]
        if len(unknown) > 1:
            return False
        known = math.prod(self.sizes[name] for name in axis.names if name not in unknown)
        if not unknown:
            if size != known:
                found = f"axis {axis} of {o.name} has size {size}"
                product = " x ".join(f"{name} ({self.sizes[name]})" for name in axis.names)
                raise SignatureError(self.k.kernel, found, f"{known}, {product}")
        elif known == 0:
            self.tell(unknown[0], 0 if size == 0 else 1, str(o))
        elif size % known:
            raise SignatureError(self.k.kernel, f"axis {axis} of {o.name} has size {size}", f"a multiple of {known}")
        else:
            self.tell(unknown[0], size // known, str(o))
        return True
