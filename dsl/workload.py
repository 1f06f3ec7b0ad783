"""Named shapes that a kernel is compiled, verified and timed at, and the ATen ops that it stands in for."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, final

from tpukern.dsl.frozen import FrozenMapping


@final
@dataclasses.dataclass(frozen=True, init=False)
class Workload:
    """A real model's shapes.

    Attributes:
        name: Its name, unique within a kernel.
        dtype: The element type.
        directions: `forward`, `backward` or both.
        source: Where the shapes come from.
        tables: Example values of `Prefetch` operands, by name.
        values: Sizes of dims (a tuple for `*` dims with several leading axes) and static arguments, by name.
    """

    name: str
    dtype: str
    directions: tuple[str, ...]
    source: str
    tables: Mapping[str, Any] = dataclasses.field(compare=False)
    values: FrozenMapping[Any]

    def __init__(
        self,
        name: str,
        *,
        dtype: str = "bfloat16",
        directions: tuple[str, ...] = ("forward", "backward"),
        source: str = "",
        tables: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> None:
        fields = {"name": name, "dtype": dtype, "directions": tuple(directions), "source": source, "tables": dict(tables or {})}
        for field, value in {**fields, "values": FrozenMapping(values)}.items():
            object.__setattr__(self, field, value)


@final
@dataclasses.dataclass(frozen=True)
class Override:
    """An ATen op that a kernel stands in for.

    Attributes:
        op: The op, as `aten::mm`.
        impl: Called with the op's own arguments, schema defaults filled in; returns what the op returns.
        cond: Called the same way; None if the kernel takes the call, else the reason why not. None: it takes every call.
        keys: Dispatch keys to register on.
        opt_in: Whether it is off unless asked for.
        flips_with: Ops that have to be overridden together with this one, or not at all.
        token: Tensors that the forward op returns and the backward op takes, to tell by their shape whose forward pass it
            was: wanted where the native kernel's saved tensors mean something else than ours. They must have no other use.
    """

    op: str
    impl: Callable[..., Any] = dataclasses.field(kw_only=True)
    cond: Callable[..., str | None] | None = dataclasses.field(default=None, kw_only=True)
    keys: tuple[str, ...] = dataclasses.field(default=("PrivateUse1",), kw_only=True)
    opt_in: bool = dataclasses.field(default=False, kw_only=True)
    flips_with: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
    token: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
