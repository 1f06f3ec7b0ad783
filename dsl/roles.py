"""What a parameter of a kernel can be: an operand's role, a grid dim, or a tunable choice.

The names with capitals are what a kernel's author writes as defaults. They are functions rather than classes so that type
checkers see a parameter's annotation (`Ref`, `Dim`) and not its declaration.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias


class Ref(Protocol):
    """A block in VMEM or SMEM, as the body of a kernel sees it: a plain Pallas ref."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def at(self) -> Any: ...
    def __getitem__(self, index: Any, /) -> Any: ...
    def __setitem__(self, index: Any, value: Any, /) -> None: ...


@dataclasses.dataclass(frozen=True)
class Input:
    dims: str
    dtype: str | None
    fill: float


@dataclasses.dataclass(frozen=True)
class Output:
    dims: str
    dtype: str | None
    init: float | None
    alias: str | None
    saved: bool


@dataclasses.dataclass(frozen=True)
class Accumulator:
    dims: str
    dtype: str
    init: float


@dataclasses.dataclass(frozen=True)
class ScratchSpace:
    dims: str
    dtype: str


@dataclasses.dataclass(frozen=True)
class Table:
    dims: str
    dtype: str


@dataclasses.dataclass(frozen=True)
class ScalarInput:
    dtype: str
    dims: str = ""


Role: TypeAlias = Input | Output | Accumulator | ScratchSpace | Table | ScalarInput


@dataclasses.dataclass(frozen=True)
class GridDim:
    """A dim that the grid walks over: in blocks of one of `choices`, or one position a step (`each`)."""

    choices: tuple[int, ...]
    default: int
    span: Callable[..., Any] | None
    each: bool


@dataclasses.dataclass(frozen=True)
class Tunable:
    """A config key of the author's own."""

    choices: tuple[Any, ...]
    default: Any


def In(dims: str, dtype: str | None = None, *, fill: float = 0) -> Any:
    """Declares an input array, which the body sees one block at a time.

    Args:
        dims: The array's axes, one token each: `d`, `*r` (all leading axes), `(a b)`, `_` (size one, not in the array), `128`,
            `k/128`, `p:table[i]`. The block's shape is this string without the axes walked by `Each`.
        dtype: Element type, or None for the type that all such operands of a call share.
        fill: What to store past the end of a dim that the kernel sums over when its last block is cut short.
    """
    return Input(dims, dtype, fill)


def Out(
    dims: str, dtype: str | None = None, *, init: float | None = None, alias: str | None = None, saved: bool = False
) -> Any:
    """Declares an output array, returned by the call, in the order of declaration.

    Args:
        dims: As for `In`. It has to name every grid dim before the last one it names.
        dtype: Element type, or None for the call's.
        init: Value that the block is set to before the first of the steps that it is summed over.
        alias: Name of the `In` of the same dims that this output is written over.
        saved: Kept for the backward pass only: not differentiated.
    """
    return Output(dims, dtype, init, alias, saved)


def Acc(dims: str, dtype: str = "float32", *, init: float = 0.0) -> Any:
    """Declares a VMEM accumulator, set to `init` at the first of the steps that it sums over.

    It sums over the grid dims after the last one that `dims` names: with a grid b, i, j, `Acc("i d")` starts anew for every
    block of i, `Acc("8 d")` only once. Naming a dim walked by `Each` costs no axis: `Acc("b 8 d")` starts anew for every b.
    """
    return Accumulator(dims, dtype, init)


def Scratch(dims: str, dtype: str = "float32") -> Any:
    """Declares VMEM that only the body touches.

    Steps over the grid dims after the last one that `dims` names run in order, on one core, since they may pass values on.
    """
    return ScratchSpace(dims, dtype)


def Prefetch(dims: str, dtype: str = "int32") -> Any:
    """Declares an integer array in SMEM, for the body, for spans and for `p:table[i]` axes."""
    return Table(dims, dtype)


def Scalar(dtype: str) -> Any:
    """Declares a traced number in SMEM: `s[0]` in the body. The caller passes an array of rank 0."""
    return ScalarInput(dtype)


def Block(*choices: int, default: int | None = None, span: Callable[..., Any] | None = None) -> Any:
    """Declares a grid dim that is walked in blocks.

    Args:
        choices: Block sizes to choose among.
        default: The one to start from; the first if None.
        span: Which positions are needed, given other grid dims, tables and statics by name: None for all, or
            `(first, one past the last)`, either of them None. Steps outside are not `live` and fetch nothing.
    """
    return GridDim(choices, next(iter(choices), 0) if default is None else default, span, each=False)


def Each(*, span: Callable[..., Any] | None = None) -> Any:
    """Declares a grid dim that is walked one position a step; blocks do not have that axis."""
    return GridDim((), 1, span, each=True)


def Choice(*choices: Any, default: Any = None) -> Any:
    """Declares a tunable: a config key whose value the body gets under the parameter's name."""
    return Tunable(choices, next(iter(choices), None) if default is None else default)
