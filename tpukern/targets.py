"""The TPU generations that kernels are compiled for, and where each figure comes from."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from tpukern.errors import ConfigError, did_you_mean

KIB = 1024
MIB = 1024 * KIB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """One TPU generation, as the ahead-of-time compiler names it.

    Attributes:
        name: The name on the command line.
        topology: Name of the smallest topology that libtpu describes for it.
        device_kind: ``jax.Device.device_kind`` on it.
        vmem_bytes: VMEM of one TensorCore (``pltpu.get_tpu_info`` of jax 0.10.2).
        scoped_vmem_bytes: What one kernel may use of it when it asks for nothing (the compiler's own error E1001,
            libtpu 0.0.51).
    """

    name: str
    topology: str
    device_kind: str
    vmem_bytes: int
    scoped_vmem_bytes: int


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        t.name: t
        for t in (
            Target(name="v4", topology="v4:2x2x1", device_kind="TPU v4", vmem_bytes=16 * MIB, scoped_vmem_bytes=16 * MIB),
            Target(name="v5e", topology="v5e:2x2", device_kind="TPU v5 lite", vmem_bytes=128 * MIB, scoped_vmem_bytes=16 * MIB),
            Target(name="v5p", topology="v5p:2x2x1", device_kind="TPU v5", vmem_bytes=64 * MIB, scoped_vmem_bytes=16 * MIB),
            Target(name="v6e", topology="v6e:2x2", device_kind="TPU v6 lite", vmem_bytes=128 * MIB, scoped_vmem_bytes=32 * MIB),
            Target(name="v7x", topology="tpu7x:2x2x1", device_kind="TPU7x", vmem_bytes=64 * MIB, scoped_vmem_bytes=32 * MIB),
        )
    }
)


def target(name: str) -> Target:
    """Returns the target called ``name``.

    Raises:
        ConfigError: There is no such target.
    """
    found = TARGETS.get(name)
    if found is None:
        raise ConfigError("target", f"no target {name!r}", f"one of {list(TARGETS)}", did_you_mean(name, TARGETS))
    return found
