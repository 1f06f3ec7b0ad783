"""Compiling for TPUs in a process that has the tpu device, before and after that is started; libtpu stays out of it."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("libtpu")

PROGRAM = """
import os
import tpukern
from tpukern import device

def compiles():
    import jax, jax.numpy as jnp
    from tpukern.kernels import rms_norm
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 256), (256,)))
    result = tpukern.compile(rms_norm.bind(x, w), "v6e", use_cache=False)
    assert result.ok, result.error
    assert jax.default_backend() == "cpu"

def adds():
    device.start()  # first: a bare import of torch makes torch_tpu load libtpu
    import torch
    assert (torch.ones(3, device="tpu") + 1).cpu().tolist() == [2, 2, 2]
    assert "cpu_plugin" not in os.environ.get("TPU_LIBRARY_PATH", "")

for step in (compiles, adds, compiles, adds):
    step()
maps = open("/proc/self/maps").read()
assert "pjrt_c_api_cpu_plugin" in maps
assert "libtpu" not in maps.replace("libtpu_torch", ""), [line for line in maps.splitlines() if "libtpu" in line]
print("done")
"""


def test_before_and_after_the_device_is_started(tmp_path):
    from tpukern import device

    if device.kind() != "emulated":
        pytest.skip("needs the emulated device")
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "TPU_LIBRARY_PATH")}
    env["TPUKERN_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, cwd="/", capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "done"
