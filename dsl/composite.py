"""Which kernels a JAX function calls: what the configs of gradients and builds are made of."""

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from tpukern.dsl import context
from tpukern.dsl.config import Config
from tpukern.dsl.signature import Signature

if TYPE_CHECKING:
    from tpukern.dsl.kernel import Kernel


@dataclasses.dataclass(frozen=True)
class Call:
    """One kernel that a composite calls, once or more often.

    Attributes:
        kernel: The kernel.
        signatures: How it is called.
        pinned: The config keys that every one of the calls sets itself; they are not part of the composite's space.
    """

    kernel: "Kernel"
    signatures: tuple[Signature, ...]
    pinned: frozenset[str]

    def free(self, config: Config) -> Config:
        """Returns the part of the called kernel's config that the composite may choose, under the composite's keys."""
        return Config({key: value for key, value in config.items() if key not in self.pinned}).prefixed(self.kernel.name)


def record(call: Call) -> tuple[jax.Array, ...]:
    """Notes a call with the recorder in force and returns arrays of its outputs' shapes."""
    recorder = context.current().recorder
    assert recorder is not None
    recorder.append(call)
    return tuple(jnp.zeros(o.shape, o.dtype) for o in call.signatures[0].outputs)


def calls_of(function: Any, specs: tuple[jax.ShapeDtypeStruct, ...]) -> list[Call]:
    """Returns the kernel calls that `function` makes on such inputs."""
    recorder: list[Call] = []
    with context.entered(dataclasses.replace(context.current(), recorder=recorder, configs={})), _own_traces():
        jax.eval_shape(function, *specs)
    return recorder


def _own_traces() -> contextlib.AbstractContextManager[Any]:
    """Keeps traces made while recording apart: a `jax.jit` inside of the function would give them out as real ones later."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    mesh = jax.sharding.AbstractMesh((1,), ("tpukern_recorder",), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def merged(calls: list[Call]) -> tuple[Call, ...]:
    """Returns the calls, those of one kernel as one."""
    found: dict[str, Call] = {}
    for call in calls:
        known = found.get(call.kernel.name, call)
        signatures = tuple(dict.fromkeys((*known.signatures, *call.signatures)))
        found[call.kernel.name] = Call(call.kernel, signatures, known.pinned & call.pinned)
    return tuple(found.values())
