"""Proof: what a kernel author runs before any TPU time is spent.

    from tpukern.testing import parity
    parity(my_kernel).check()

The parts, from the bottom: `values` (inputs), `ulp` (the one error metric), `reference` (what should come out), `jaxprs`
(rewriting of traced programs), `arithmetic` (what the chip's units compute), `watching` and `semantics` (what its memory
does); `strategies` (what is drawn from a declaration), `programs` (kernels ready to run), `judging` (what counts as right),
`properties`, `on_chip` and `strides` (the questions), `shrinking` and `repro` (what becomes of failures), `verdict` (all);
`plugin` and `items` (verdicts as pytest tests); `faults`, `traced_faults`, `canonical` (what programs compute) and `mutation`
(how the verdict itself is judged).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpukern.testing.findings import PROPERTIES, Finding, Result, Verdict, Worst
    from tpukern.testing.items import verdict_tests
    from tpukern.testing.strategies import Case, Point
    from tpukern.testing.verdict import parity

__all__ = ["PROPERTIES", "Case", "Finding", "Point", "Result", "Verdict", "Worst", "parity", "verdict_tests"]

_HOMES = {"parity": "verdict", "verdict_tests": "items", "Case": "strategies", "Point": "strategies"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'findings')}"), name)
