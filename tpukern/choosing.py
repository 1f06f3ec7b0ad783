"""Names that a user gives to `tpukern.enable`, and the ATen ops they stand for. Needs no torch, so no device either."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tpukern.errors import OverrideError, did_you_mean

if TYPE_CHECKING:
    from tpukern.dsl import Kernel, Override

Chosen = list[tuple["Kernel", "Override"]]


def declared_overrides() -> Chosen:
    """Returns the overrides of every kernel declared so far, those that ship with tpukern among them."""
    import tpukern.kernels  # noqa: F401 (declares the kernels that ship)
    from tpukern.dsl import declared

    return [(kernel, override) for kernel in declared.kernels() for override in kernel.overrides]


def ops_of(names: Iterable[str] | str, every: Chosen) -> set[str]:
    """Returns the ATen ops that names of kernels, of their ops or of ATen ops stand for, with those that flip with them.

    Raises:
        OverrideError: A name is unknown.
    """
    known: dict[str, set[str]] = {}
    for kernel, override in every:
        for name in (kernel.name, kernel.op, override.op, override.op.removeprefix("aten::")):
            if name is not None:
                known.setdefault(name, set()).update((override.op, *override.flips_with))
    found: set[str] = set()
    for name in (names,) if isinstance(names, str) else names:
        if name not in known:
            shown = sorted({kernel.name for kernel, _ in every} | {override.op for _, override in every})
            raise OverrideError("enable", f"no override {name!r}", f"one of {shown}", did_you_mean(str(name), known))
        found |= known[name]
    return found
