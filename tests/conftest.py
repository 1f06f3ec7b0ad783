"""Imports torch before warnings are errors: loading it and torch_tpu warns about their own deprecated calls.

The device is started before the first test, once a process and so once an xdist worker: PyTorch's autograd asks torch_tpu for
its devices, which would load libtpu and leave no way to the emulated one.
"""

import signal
import warnings

import pytest

# A runner in the background may leave SIGINT ignored, which children would inherit; some tests interrupt theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch


@pytest.fixture(scope="session", autouse=True)
def started() -> str:
    """The kind of the device, which is started unless it is "none"."""
    from tpukern import device

    torch.set_num_threads(1)  # two threads beside XLA's are slower by far
    return device.start() if device.kind() != "none" else "none"


@pytest.fixture(scope="session")
def tpu(started: str) -> str:
    """The kind of the started device, "tpu" or "emulated"; skips where torch_tpu has no build."""
    if started == "none":
        pytest.skip("no tpu device: pip install 'tpukern[emulator]'")
    return started
