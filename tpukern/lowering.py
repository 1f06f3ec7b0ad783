"""Bound -> Lowered: one trace for one chip, kept as the module that compiles and as texts to read and compare."""

import dataclasses
import os
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tpukern import jax_adapter, targets, value_names
from tpukern.errors import ConfigError, LowerError, TpukernError
from tpukern.targets import Target


class Named(Protocol):
    """What lowering needs of a kernel."""

    @property
    def name(self) -> str: ...


class Lowerable(Protocol):
    """What lowering needs of a Bound: a JAX callable, the shapes to trace it at, and whose it is."""

    @property
    def kernel(self) -> Named: ...
    @property
    def function(self) -> Callable[..., Any]: ...
    @property
    def specs(self) -> Sequence[Any]: ...
    @property
    def target(self) -> Target | None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lowered:
    """A kernel traced for one chip.

    Attributes:
        bound: What was lowered.
        target: The chip it was traced for.
        stablehlo: The module as readable StableHLO without locations; ``<mosaic N>`` stands for the body of kernel N.
        mosaic: The body of each Mosaic kernel as readable text without locations, in the order of the module.
        module: The serialized module: what the compiler and the device take. Its bytes hold source locations, so they differ
            between checkouts at equal meaning.
        digest: SHA-256 over ``stablehlo`` and ``mosaic``: equal digests compile to the same code.
        vmem_bytes: VMEM that the largest of its Mosaic kernels cannot do without.
    """

    bound: Lowerable
    target: Target
    stablehlo: str = dataclasses.field(repr=False)
    mosaic: tuple[str, ...] = dataclasses.field(repr=False)
    module: bytes = dataclasses.field(repr=False)
    digest: str
    vmem_bytes: int = 0


def lower(bound: Lowerable, target: Target | str | None = None) -> Lowered:
    """Lowers a bound kernel for a chip. Needs no TPU and no libtpu.

    Args:
        bound: The kernel at its shapes and config.
        target: The chip; None takes the one ``bound`` was bound for.

    Raises:
        ConfigError: No such target, or none given.
        LowerError: The body raised, or Pallas refuses it; says where in the kernel's source. The cause is kept.
    """
    chip = resolve_target(bound, target)
    jax_adapter.load()
    from tpukern.dsl import context

    fresh = context.Context(target=chip, interpret=False)  # whatever the caller is in the middle of must not leak in
    try:
        with jax_adapter.device_context(chip), context.entered(fresh):
            exported = jax_adapter.export_for_tpu(bound.function, bound.specs, bound.kernel.name)
    except TpukernError:
        raise
    except Exception as error:
        raise _lower_error(bound.kernel.name, chip, error) from error
    module = bytes(exported.mlir_module_serialized)
    stablehlo, calls = jax_adapter.module_texts(module)
    mosaic = tuple(call.mosaic for call in calls)
    return Lowered(
        bound=bound,
        target=chip,
        stablehlo=stablehlo,
        mosaic=mosaic,
        module=module,
        digest=value_names.digest([stablehlo, *mosaic]),
        vmem_bytes=max((jax_adapter.window_bytes(text) for text in mosaic), default=0),
    )


def resolve_target(bound: Lowerable, target: Target | str | None) -> Target:
    """Returns the target meant: the one named, else the one ``bound`` was bound for."""
    if isinstance(target, str):
        return targets.target(target)
    chosen = target or bound.target
    if chosen is None:
        raise ConfigError(bound.kernel.name, "no target", f"one of {list(targets.TARGETS)}", "Bind for a target, or name one.")
    return chosen


def _lower_error(name: str, target: Target, error: Exception) -> LowerError:
    """Puts JAX's exception in our form, with the kernel's own line."""
    said = re.sub(r"Please file an issue at \S+", "", " ".join(str(error).split())).strip()[:1000]
    found = f"{type(error).__name__}: {said}" if said else type(error).__name__
    place = _place(error)
    return LowerError(
        name,
        found.rstrip(". ") + (f", at {place}" if place else ""),
        "a body that Pallas can lower",
        target=target.name,
    )


def _place(error: BaseException) -> str:
    """Returns ``file:line`` of the innermost frame outside JAX and tpukern that led to an exception, or an empty string.

    For an operation that fails while lowering, JAX keeps the trace of the Python line that made it as a cause.
    """
    best = ""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames = [f for f in traceback.extract_tb(current.__traceback__) if _is_users(f.filename)]
        if frames and (not best or type(current).__name__ == "JaxStackTraceBeforeTransformation"):
            best = f"{frames[-1].filename}:{frames[-1].lineno}"
        current = current.__cause__ or current.__context__
    return best


def _is_users(filename: str) -> bool:
    here = os.path.dirname(os.path.realpath(__file__))
    real = os.path.realpath(filename)
    kernels = os.path.realpath(os.path.join(here, "kernels")) + os.sep
    ours = (here + os.sep, os.path.realpath(os.path.join(here, "dsl")) + os.sep)
    if real.startswith(kernels):
        return True
    return not value_names.is_library(filename) and not real.startswith(ours)
