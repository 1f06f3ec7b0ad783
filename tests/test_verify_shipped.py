"""The verdict on every shipped kernel, compiled for two chips at the borders of its blocks.

With fewer examples than `tpukern verify` has, and few shapes: half a minute of one core a kernel, some two for attention.
A kernel of the Pallas frontend joins by being named in `kernels.__all__`; those in Helion: `test_kernels_helion`.
"""

import pytest

from tpukern import kernels
from tpukern.testing import PROPERTIES, parity

TARGETS = ("v5e", "v7x")  # the strictest layouts with the least VMEM, and the newest
EXAMPLES, SHAPES = 12, 2

PALLAS = [name for name in kernels.__all__ if getattr(kernels, name).frontend == "pallas"]


@pytest.mark.parametrize("name", PALLAS)
def test_the_verdict(name: str) -> None:
    kernel = getattr(kernels, name)
    verdict = parity(kernel, examples=EXAMPLES, shapes=SHAPES, targets=TARGETS)
    assert verdict.findings == ()
    assert verdict.ok
    asked = {(r.property, r.direction) for r in verdict.results if r.cases}
    wanted = {(p, d) for p, directions in PROPERTIES.items() for d in directions if d in kernel.directions}
    assert asked == wanted
    compiled = next(r.cases for r in verdict.results if r.property == "compiles")
    assert compiled >= len(kernel.dtypes) * len(kernel.directions) * len(TARGETS)
    assert {w.dtype for w in verdict.worst} == set(kernel.dtypes)
