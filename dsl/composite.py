"""Which kernels a JAX function calls: what the configs of gradients and builds are made of."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from tpukern.dsl import context
from tpukern.dsl.config import Config
from tpukern.dsl.signature import Signature
from tpukern.targets import Target

if TYPE_CHECKING:
    from tpukern.dsl.kernel import Kernel


@dataclasses.dataclass(frozen=True)
class Call:
    """One kernel that a composite calls.

    Attributes:
        kernel: The kernel.
        signature: How it is called.
        pinned: The config keys that the call itself sets; they are not part of the composite's space.
    """

    kernel: "Kernel"
    signature: Signature
    pinned: frozenset[str]

    def free(self, config: Config) -> Config:
        """Returns the part of the called kernel's config that the composite may choose."""
        return Config({key: value for key, value in config.items() if key not in self.pinned})

    def free_configs(self, target: Target | None) -> tuple[Config, ...]:
        """Returns the distinct free parts of the called kernel's configs."""
        return tuple(dict.fromkeys(self.free(config) for config in self.kernel.configs(self.signature, target)))


def record(call: Call) -> tuple[jax.Array, ...]:
    """Notes a call with the recorder in force and returns arrays of its outputs' shapes."""
    recorder = context.current().recorder
    assert recorder is not None
    recorder.append(call)
    return tuple(jnp.zeros(o.shape, o.dtype) for o in call.signature.outputs)


def calls_of(function: Any, specs: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[Call, ...]:
    """Returns the kernels that `function` calls on such inputs: each once, at the largest of its signatures."""
    recorder: list[Call] = []
    with context.entered(dataclasses.replace(context.current(), recorder=recorder, configs={})):
        jax.eval_shape(function, *specs)
    found: dict[str, Call] = {}
    for call in recorder:
        known = found.get(call.kernel.name)
        if known is None or _elements(call) > _elements(known):
            found[call.kernel.name] = call
    return tuple(found.values())


def _elements(call: Call) -> int:
    return sum(math.prod(o.shape) for o in call.signature.inputs)
