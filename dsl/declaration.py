"""A kernel's declaration, read off the signature of its function."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

from tpukern.dsl import dims as d
from tpukern.dsl.frozen import FrozenMapping
from tpukern.dsl.roles import Accumulator, GridDim, Input, Output, Role, ScalarInput, ScratchSpace, Table, Tunable
from tpukern.errors import SignatureError, did_you_mean

REQUIRED: Final = inspect.Parameter.empty
RESERVED: Final = ("order", "config", "layouts", "target")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One operand: its name, role and axes."""

    name: str
    role: Role
    axes: tuple[d.Axis, ...]

    @functools.cached_property
    def array_axes(self) -> tuple[d.Axis, ...]:
        return d.array_axes(self.axes)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The dims of its axes, in order."""
        return tuple(name for axis in self.axes for name in d.names_of(axis))

    @functools.cached_property
    def walked_by(self) -> frozenset[str]:
        """The dims whose grid indices say which of its blocks is wanted."""
        return frozenset(name for axis in self.axes for name in d.walked_by(axis))

    def __str__(self) -> str:
        return f'{self.name} "{self.role.dims}"' if self.axes else f"{self.name} of rank 0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declaration:
    """Everything that a kernel's function says of itself.

    Attributes:
        kernel: Its name.
        operands: In the order of the body's positional parameters.
        dims: The `Block` and `Each` parameters, in order.
        choices: The `Choice` parameters.
        statics: Defaults of the other keyword parameters, or `REQUIRED`.
        static_types: Their annotations (a string if it cannot be evaluated).
        grid: The dims that the grid walks over, outermost first, if the order is left alone.
        dtypes: What the call's element type may be; empty for anything.
        tile: Whether the function is the body of one grid (else its `build` decides what happens).
    """

    kernel: str
    operands: tuple[Parameter, ...]
    dims: FrozenMapping[GridDim]
    choices: FrozenMapping[Tunable]
    statics: FrozenMapping[Any]
    static_types: FrozenMapping[Any]
    grid: tuple[str, ...]
    dtypes: tuple[str, ...] = ()
    tile: bool = True

    def _with(self, *roles: type) -> tuple[Parameter, ...]:
        return tuple(o for o in self.operands if isinstance(o.role, roles))

    @functools.cached_property
    def inputs(self) -> tuple[Parameter, ...]:
        """What the caller passes, in order."""
        return self._with(Input, Table, ScalarInput)

    @functools.cached_property
    def outputs(self) -> tuple[Parameter, ...]:
        return self._with(Output)

    @functools.cached_property
    def scratch(self) -> tuple[Parameter, ...]:
        return self._with(Accumulator, ScratchSpace)

    @functools.cached_property
    def tables(self) -> tuple[Parameter, ...]:
        return self._with(Table)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The dims whose block is chosen, in order."""
        return tuple(name for name, dim in self.dims.items() if not dim.each)

    @property
    def keys(self) -> tuple[str, ...]:
        """The kernel's own config keys, `order` left out."""
        return (*(f"block_{name}" for name in self.blocks), *self.choices)

    @functools.cached_property
    def int_statics(self) -> tuple[str, ...]:
        """The static arguments that may give the size of a dim of their name."""
        return tuple(n for n, v in self.statics.items() if v is REQUIRED or (isinstance(v, int) and not isinstance(v, bool)))

    @property
    def star(self) -> str | None:
        """The dim that stands for all leading axes, if any operand has one."""
        axes = (axis for o in self.operands for axis in o.axes)
        return next((axis.name for axis in axes if isinstance(axis, d.Named) and axis.leading), None)

    @property
    def lookups(self) -> tuple[tuple[Parameter, d.Lookup], ...]:
        """Every axis that is looked up in a table."""
        return tuple((o, axis) for o in self.operands for axis in o.axes if isinstance(axis, d.Lookup))

    def operand(self, name: str) -> Parameter | None:
        return next((o for o in self.operands if o.name == name), None)

    def summed(self, operand: Parameter, order: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the grid dims that `operand` is summed over: those after the last one that it names."""
        named = [order.index(name) for name in operand.walked_by if name in order]
        return order[max(named, default=-1) + 1 :]


def read(kernel: str, fn: Callable[..., Any], *, dtypes: tuple[str, ...], tile: bool) -> Declaration:
    """Reads the declaration of `fn`; `rules.check` judges it.

    Raises:
        SignatureError: A parameter is not one of those of the form, or its dims cannot be read.
    """
    operands, keywords, annotations = [], {}, _annotations(fn)
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            keywords[parameter.name] = parameter.default
        else:
            operands.append(_parameter(kernel, parameter))
    grid_dims = _only(keywords, GridDim)
    statics = {name: value for name, value in keywords.items() if not isinstance(value, GridDim | Tunable)}
    looked_up = {axis.name for o in operands for axis in o.axes if isinstance(axis, d.Lookup)}
    return Declaration(
        kernel=kernel,
        operands=tuple(operands),
        dims=FrozenMapping(grid_dims),
        choices=FrozenMapping(_only(keywords, Tunable)),
        statics=FrozenMapping(statics),
        static_types=FrozenMapping({name: annotations.get(name, Any) for name in statics}),
        grid=tuple(name for name in grid_dims if name not in looked_up),
        dtypes=dtypes,
        tile=tile,
    )


def _annotations(fn: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.get_annotations(fn, eval_str=True)
    except (NameError, SyntaxError):  # names that only type checkers see
        return inspect.get_annotations(fn)


def _only(keywords: Mapping[str, Any], kind: type[R]) -> dict[str, R]:
    return {name: value for name, value in keywords.items() if isinstance(value, kind)}


def _parameter(kernel: str, parameter: inspect.Parameter) -> Parameter:
    role = parameter.default
    if not isinstance(role, Role):
        if isinstance(role, GridDim | Tunable):
            kind = "a Choice" if isinstance(role, Tunable) else "an Each" if role.each else "a Block"
            found = f"parameter {parameter.name} is {kind} before the '*'"
            raise SignatureError(kernel, found, "it among the keyword-only parameters, after the '*'")
        raise SignatureError(
            kernel,
            f"parameter {parameter.name} says neither In, Out, Acc, Scratch, Prefetch nor Scalar",
            "one of them as its default",
        )
    return Parameter(parameter.name, role, d.parse(role.dims, kernel))


def unknown_keyword(kernel: str, name: str, known: tuple[str, ...], hidden: tuple[str, ...] = ()) -> tuple[str, str, str, str]:
    """Returns the arguments of the error for a keyword that nobody declared."""
    return kernel, f"no keyword {name!r}", f"one of {list(known)}", did_you_mean(name, (*known, *hidden))


def each_output(declaration: Declaration) -> Iterator[tuple[Parameter, Output]]:
    """Yields the outputs with their role."""
    for operand in declaration.outputs:
        assert isinstance(operand.role, Output)
        yield operand, operand.role
