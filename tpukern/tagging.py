"""What graphs made by torch.compile depend on: its caches see neither kernels nor overrides."""

import functools
import hashlib
import pathlib

from tpukern import device
from tpukern.autotune import recalling
from tpukern.registry import REGISTRY
from tpukern.version import __version__


def tag(*, fresh: bool = False) -> None:
    """Adds the fingerprint to `torch.compiler.config.cache_key_tag`: another process then takes no graph of other kernels.

    Args:
        fresh: Whether to read the kernels' sources again.
    """
    from torch.compiler import config

    if fresh:
        REGISTRY.digests.clear()
    if REGISTRY.tag is None or config.cache_key_tag != REGISTRY.tag:
        REGISTRY.user_tag = config.cache_key_tag
    REGISTRY.tag = config.cache_key_tag = f"{REGISTRY.user_tag}tpukern-{fingerprint()}"
    _tag_other_threads(REGISTRY.tag)


def _tag_other_threads(value: str) -> None:
    """PyTorch keeps a setting for the thread that made it; a thread that made none has the default, which is no public name."""
    from torch.compiler import config

    config._config["cache_key_tag"].default = value  # type: ignore[attr-defined]


def ensure() -> None:
    """Tags if nobody has: a kernel's op may be compiled for the device without `tpukern.enable`."""
    if REGISTRY.tag is None:
        tag()


def forget(op: str) -> None:
    """Reads the source of the kernel behind `op` again."""
    REGISTRY.digests.pop(op, None)


@functools.cache
def _own_source() -> str:
    """Returns a digest of what turns kernels into graphs' parts."""
    folder = pathlib.Path(__file__).parent
    sources = [(folder / name).read_bytes() for name in ("running.py", "torch_ops.py", "routing.py", "jax_adapter.py")]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()


def fingerprint() -> str:
    """Returns a digest of all kernels with an op, the overrides in force, the device, its tuned configs and tpukern itself."""
    state = hashlib.sha256(f"{__version__} {device.kind()} {device.target()} {_own_source()}".encode())
    state.update(recalling.state(device.target()).encode())
    for op, entry in sorted(REGISTRY.ops.items()):
        digest = REGISTRY.digests.get(op)
        if digest is None:
            digest = REGISTRY.digests[op] = entry.kernel.source_digest()
        state.update(f"{op} {entry.kernel.name} {digest}\n".encode())
    for op, key in sorted(REGISTRY.active):
        active = REGISTRY.active[op, key]
        state.update(f"{op} {key} {active.kernel.name} {active.digest}\n".encode())
    return state.hexdigest()[:32]
