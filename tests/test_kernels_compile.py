"""Every shipped kernel compiles, in both directions, at every workload it claims, for every chip that it has to."""

import pytest

from tpukern import compiling, kernels, target
from tpukern.dsl import Kernel, Workload

KERNELS: list[Kernel] = [k for name in kernels.__all__ if (k := getattr(kernels, name)).frontend == "pallas"]
# Beyond the borders of blocks, which tests/test_verify_shipped.py compiles.
ODD: dict[str, list[dict[str, object]]] = {
    "linear": [{"m": 37, "n": 100, "k": 300, "act": act} for act in ("relu", "silu", "gelu_tanh")],
    "flash_attention": [
        {"b": 1, "hk": 1, "g": 2, "i": 1, "j": 1000, "d": 64, "e": 48},  # decoding: a product with one row
        {"b": 1, "hk": 1, "g": 1, "i": 300, "j": 1, "d": 32, "e": 32, "causal": True},
        {"b": 1, "hk": 1, "g": 1, "i": 300, "j": 200, "d": 80, "e": 160, "causal": True},
        {"b": 1, "hk": 1, "g": 1, "i": 1024, "j": 1024, "d": 256, "e": 256, "causal": True},
    ],
}


def jobs(kernel: Kernel, workloads: tuple[Workload, ...], chip: str) -> list[compiling.Job]:
    return [
        compiling.Job(
            bound=one.bind_signature(one.workload_signature(workload), target=chip),
            target=target(chip),
            direction=direction,
            workload=workload.name,
        )
        for workload in workloads
        for direction, one in kernel.directions.items()
        if direction in workload.directions
    ]


def assert_compiled(wanted: list[compiling.Job]) -> None:
    results = compiling.compile_many(wanted)
    assert [(r.kernel, r.workload, r.config, r.error) for r in results if not r.ok] == []
    limit = wanted[0].target.scoped_vmem_bytes
    assert all(r.vmem_bytes and r.vmem_bytes <= limit for r in results)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("chip", ["v5e", "v6e", "v7x"])
def test_every_workload(chip: str) -> None:
    assert_compiled([job for kernel in KERNELS for job in jobs(kernel, kernel.workloads, chip)])


def test_odd_shapes() -> None:
    """On the chip with the least VMEM and the strictest layouts, in either type by turns."""
    wanted: list[compiling.Job] = []
    for name, shapes in ODD.items():
        kernel: Kernel = getattr(kernels, name)
        for n, values in enumerate(shapes):
            wanted += jobs(kernel, (Workload(f"odd{n}", dtype=kernel.dtypes[n % 2], **values),), "v5e")
    assert_compiled(wanted)
