"""What graphs made by torch.compile depend on: its caches see neither kernels nor overrides."""

import hashlib
import importlib

from tpukern import device
from tpukern.registry import REGISTRY
from tpukern.version import __version__


def tag() -> None:
    """Adds the fingerprint to `torch.compiler.config.cache_key_tag`, so that another process takes no graph of other kernels."""
    config = importlib.import_module("torch.compiler.config")
    if REGISTRY.user_tag is None:
        REGISTRY.user_tag = config.cache_key_tag
    config.cache_key_tag = f"{REGISTRY.user_tag}tpukern-{fingerprint()}"


def fingerprint() -> str:
    """Returns a digest of all kernels with an op, the overrides in force, the device and tpukern itself."""
    state = hashlib.sha256(f"{__version__} {device.kind()} {device.target()}".encode())
    kernels = {op: entry.kernel for op, entry in REGISTRY.ops.items()}
    for op, kernel in sorted(kernels.items()):
        state.update(f"{op} {kernel.name} {kernel.source_digest()}\n".encode())
    for op, key in sorted(REGISTRY.active):
        active = REGISTRY.active[op, key]
        state.update(f"{op} {key} {active.kernel.name} {active.digest}\n".encode())
    return state.hexdigest()[:32]
