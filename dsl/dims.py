"""Dims strings: how they are written and what each token stands for."""

import dataclasses
import functools
import re
from typing import TypeAlias

from tpukern.errors import SignatureError


@dataclasses.dataclass(frozen=True)
class Named:
    """`d`: one axis, one dim. `*d` (`leading`): all leading axes, taken as one."""

    name: str
    leading: bool = False

    def __str__(self) -> str:
        return f"*{self.name}" if self.leading else self.name


@dataclasses.dataclass(frozen=True)
class Group:
    """`(a b)`: one axis of size a*b, b fastest."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"({' '.join(self.names)})"


@dataclasses.dataclass(frozen=True)
class Exact:
    """`128`: an axis of exactly that size. `_` (`virtual`): size one, and the array does not have it."""

    size: int
    virtual: bool = False

    def __str__(self) -> str:
        return "_" if self.virtual else str(self.size)


@dataclasses.dataclass(frozen=True)
class Per:
    """`k/128`: one entry for each 128 of k."""

    name: str
    per: int

    def __str__(self) -> str:
        return f"{self.name}/{self.per}"


@dataclasses.dataclass(frozen=True)
class Lookup:
    """`p:table[i,j]`: the block of p that the table says for grid indices i, j."""

    name: str
    table: str
    at: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}:{self.table}[{','.join(self.at)}]"


Axis: TypeAlias = Named | Group | Exact | Per | Lookup

_NAME = r"[A-Za-z]\w*"
_TOKEN = re.compile(
    rf"\s*(?:(?P<lookup>{_NAME}):(?P<table>{_NAME})\[(?P<at>[^\]]*)\]|(?P<per>{_NAME})/(?P<every>[1-9]\d*)"
    rf"|(?P<star>\*?)(?P<name>{_NAME})|\((?P<group>[^()]*)\)|(?P<virtual>_)|(?P<size>\d+))(?=\s|$)"
)
RULE = "names, (a b), *a, _, 1, k/128, a:table[i]"


def _axis(found: re.Match[str]) -> Axis | None:
    if found["lookup"]:
        at = tuple(part.strip() for part in found["at"].split(","))
        return Lookup(found["lookup"], found["table"], at) if all(re.fullmatch(_NAME, a) for a in at) else None
    if found["per"]:
        return Per(found["per"], int(found["every"]))
    if found["name"]:
        return Named(found["name"], leading=bool(found["star"]))
    if found["group"] is not None:
        names = tuple(found["group"].split())
        return Group(names) if names and all(re.fullmatch(_NAME, name) for name in names) else None
    return Exact(1, virtual=True) if found["virtual"] else Exact(int(found["size"]))


@functools.lru_cache(maxsize=1024)
def parse(text: str, subject: str) -> tuple[Axis, ...]:
    """Reads a dims string.

    Args:
        text: What was written.
        subject: The kernel, for the error.

    Raises:
        SignatureError: A token is none of those of `RULE`.
    """
    axes, at = [], 0
    while text[at:].strip():
        found = _TOKEN.match(text, at)
        axis = _axis(found) if found else None
        if found is None or axis is None:
            raise SignatureError(subject, f"cannot read {_unreadable(text, at)!r} in dims {text!r}", RULE)
        axes.append(axis)
        at = found.end()
    return tuple(axes)


def _unreadable(text: str, at: int) -> str:
    """Returns the character that stops the reading: the token up to there is fine."""
    rest = text[at:].lstrip()
    if rest[0] in "(*" or ":" in rest.split()[0]:
        return rest.split(")")[0] + ")" if rest[0] == "(" and ")" in rest else rest.split()[0]
    good = re.match(rf"{_NAME}|\d+|_", rest)
    return rest[good.end() if good else 0]


def array_axes(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Returns the axes that the caller's array has."""
    return tuple(axis for axis in axes if not (isinstance(axis, Exact) and axis.virtual))


def names_of(axis: Axis) -> tuple[str, ...]:
    """Returns the dims that an axis is made of (a table's indices are not part of it)."""
    if isinstance(axis, Group):
        return axis.names
    return () if isinstance(axis, Exact) else (axis.name,)


def walked_by(axis: Axis) -> tuple[str, ...]:
    """Returns the dims whose grid indices say which block of the axis is wanted."""
    return axis.at if isinstance(axis, Lookup) else names_of(axis)
