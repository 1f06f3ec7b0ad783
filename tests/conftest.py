"""Imports torch before warnings are errors: loading it and torch_tpu warns about their own deprecated calls.

`tpu` starts the device, once a process and so once an xdist worker.
"""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch


@pytest.fixture(scope="session")
def tpu() -> str:
    """The kind of the started device, "tpu" or "emulated"; skips where torch_tpu has no build."""
    from tpukern import device

    if device.kind() == "none":
        pytest.skip("no tpu device: pip install 'tpukern[emulator]'")
    kind = device.start()
    torch.set_num_threads(1)  # two threads beside XLA's are slower by far
    return kind
