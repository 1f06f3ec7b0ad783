"""The exported module, compiled in a worker, is the machine code of lowering for the topology itself.

Only libtpu can say so, and it must not be loaded in the test process: the comparison runs in one of its own.
"""

import os
import subprocess
import sys

import pytest

from tpukern.targets import TARGETS

pytest.importorskip("libtpu")

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention, matmul
from jax.sharding import SingleDeviceSharding
from tpukern import jax_adapter
from tpukern.kernels import rms_norm
from tpukern.targets import TARGETS

def attention_gradient(q, k, v):
    loss = lambda *qkv: flash_attention.flash_attention(*qkv, causal=True).astype(jnp.float32).sum()
    return jax.grad(loss, (0, 1, 2))(q, k, v)

def signs(x):
    return rms_norm(x, x[0])[0] + jnp.sign(x)

S = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
CASES = {
    "matmul": (lambda x, y: matmul.matmul(x, y, block_shape=(256, 256), block_k=256), [S(1024, 1024)] * 2),
    "attention": (attention_gradient, [S(1, 2, 512, 128)] * 3),
    "tile": (signs, [S(512, 512)]),
}

from tpukern.dsl import using
for target in TARGETS.values():
    device = jax_adapter.topology_device(target.topology)
    assert device.device_kind == target.device_kind, (device.device_kind, target)
    assert device.num_cores == jax_adapter._CORES.get(target.name, 1), (device.num_cores, target)
    for name, (function, specs) in CASES.items():
        with using(target=target), jax_adapter.device_context(target):
            exported = jax_adapter.export_for_tpu(function, specs, name)
            placed = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=SingleDeviceSharding(device)) for s in specs]
            direct = jax.jit(jax_adapter.retraced(function, name), keep_unused=True).lower(*placed).compile()
        size, ours = jax_adapter.compile_module(exported.mlir_module_serialized, device, {})
        theirs = direct.runtime_executable().serialize()
        assert size == direct.memory_analysis().generated_code_size_in_bytes > 0
        assert ours[:size] == theirs[:size], f"{target.name} {name}: the code differs"
        assert ours[:size] != bytes(size)
        assert jax_adapter.scoped_vmem_bytes(ours) == jax_adapter.scoped_vmem_bytes(theirs) > 0
        print(target.name, name, size)
"""


def test_both_roads_give_the_same_machine_code(tmp_path):
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_MIN_LOG_LEVEL": "3",
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, cwd="/", capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        [target, case] for target in TARGETS for case in ("matmul", "attention", "tile")
    ]
