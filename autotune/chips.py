"""What the clock, the units and the memory of each TPU generation can do, and where each figure comes from.

Peaks are from Google Cloud's page on each generation (https://docs.cloud.google.com/tpu/docs/v5e and its neighbours v4, v5p,
v6e, tpu7x). Clocks follow from peak and matrix units. The sustained share of the bandwidth is what a published kernel that
streams weights reaches on v6e, and a published plateau of copies on tpu7x; the others have v6e's. The latency was chosen on
one published run, JAX's 128-block matmul of 4096 on v5e, and is used for all.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tpukern.targets import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """What a kernel on one device has.

    Attributes:
        name: The target's name.
        clock_hz: Bundles a second.
        peak_flops: bfloat16 operations a second of one device.
        hbm_bytes_per_s: Bandwidth of its memory, as published.
        sustained: Share of it that long transfers reach.
        dma_latency_s: From the last byte of a transfer to its flag.
        granule_bytes: Unit of a DMA's size.
    """

    name: str
    clock_hz: float
    peak_flops: float
    hbm_bytes_per_s: float
    sustained: float
    dma_latency_s: float = 430e-9
    granule_bytes: int = 32

    @property
    def sustained_bytes_per_s(self) -> float:
        return self.hbm_bytes_per_s * self.sustained


_TERA: Final = 1e12
_GIGA: Final = 1e9

CHIPS: Final[Mapping[str, Chip]] = MappingProxyType(
    {
        c.name: c
        for c in (
            # 275 TFLOP/s over two TensorCores of four 128 x 128 units; a kernel runs on one of them
            Chip(
                name="v4",
                clock_hz=1.05e9,
                peak_flops=275 * _TERA,
                hbm_bytes_per_s=1228 * _GIGA,
                sustained=0.88,
                granule_bytes=512,
            ),
            # 197 TFLOP/s / (4 units x 128^2 x 2)
            Chip(name="v5e", clock_hz=1.5e9, peak_flops=197 * _TERA, hbm_bytes_per_s=819 * _GIGA, sustained=0.88),
            # 459 TFLOP/s / (2 cores x 4 units x 128^2 x 2)
            Chip(name="v5p", clock_hz=1.75e9, peak_flops=459 * _TERA, hbm_bytes_per_s=2765 * _GIGA, sustained=0.88),
            # 918 TFLOP/s / 524,288 operations a cycle (2 units, 16 x 256 rows every 8 bundles)
            Chip(name="v6e", clock_hz=1.75e9, peak_flops=918 * _TERA, hbm_bytes_per_s=1640 * _GIGA, sustained=0.88),
            # one of the two TensorCores of a chip, with half its memory: 2307 TFLOP/s and 7380 GB/s
            Chip(name="v7x", clock_hz=2.2e9, peak_flops=2307 / 2 * _TERA, hbm_bytes_per_s=7380 / 2 * _GIGA, sustained=0.87),
        )
    }
)


def chip(target: Target) -> Chip:
    """Returns the figures of a target."""
    return CHIPS[target.name]
