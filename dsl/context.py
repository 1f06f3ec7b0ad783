"""How kernels run when JAX calls them: for which chip, in interpret form or not, under which configs."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax

from tpukern.dsl.config import Config
from tpukern.targets import Target
from tpukern.targets import target as target_named


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """What `using` set.

    Attributes:
        target: The chip to trace for.
        interpret: True, False, `pltpu.InterpretParams`, or None: interpret unless there is a target or JAX runs on a TPU.
        configs: Configs by kernel name.
        recorder: Where calls are noted instead of being traced, while a composite is searched for the kernels that it calls.
    """

    target: Target | None = None
    interpret: Any = None
    configs: Mapping[str, Config] = dataclasses.field(default_factory=dict)
    recorder: list[Any] | None = None

    @property
    def interpreted(self) -> Any:
        """What `pallas_call` gets as `interpret`."""
        if self.interpret is not None:
            return self.interpret
        return self.target is None and jax.default_backend() != "tpu"


_CURRENT: Final = contextvars.ContextVar("tpukern_context", default=Context())  # noqa: B039 (a frozen value)


def current() -> Context:
    """Returns the context in force."""
    return _CURRENT.get()


def interpreted() -> Any:
    """Returns what a `build` has to give its own `pallas_call` as `interpret`."""
    return _CURRENT.get().interpreted


@contextlib.contextmanager
def using(
    target: Target | str | None = None, interpret: Any = None, configs: Mapping[str, Config | Mapping[str, Any]] | None = None
) -> Iterator[Context]:
    """Runs kernels called from JAX for a chip, in interpret form or not, under these configs.

    It acts when JAX traces: a function under `jax.jit` that was traced before keeps what it was traced with.

    Args:
        target: The chip to trace for; None leaves what an outer `using` said.
        interpret: True (plain JAX operations), False (Mosaic) or `pltpu.InterpretParams` (the TPU's memory, simulated). None
            leaves what an outer `using` said; without one, interpret form is used unless there is a target or a TPU.
        configs: Configs by kernel name, added to those of an outer `using`.
    """
    outer = _CURRENT.get()
    chosen = {name: config if isinstance(config, Config) else Config(config) for name, config in (configs or {}).items()}
    inner = dataclasses.replace(
        outer,
        target=target_named(target) if isinstance(target, str) else target or outer.target,
        interpret=outer.interpret if interpret is None else interpret,
        configs={**outer.configs, **chosen},
    )
    with entered(inner):
        yield inner


@contextlib.contextmanager
def entered(context: Context) -> Iterator[None]:
    """Makes `context` the one in force."""
    token = _CURRENT.set(context)
    try:
        yield
    finally:
        _CURRENT.reset(token)
