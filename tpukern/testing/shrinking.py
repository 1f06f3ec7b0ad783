"""A smaller input that fails the same way."""

import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from tpukern.dsl.frozen import FrozenMapping
from tpukern.errors import TpukernError
from tpukern.testing.findings import Finding
from tpukern.testing.strategies import Case

if TYPE_CHECKING:
    from tpukern.testing.properties import Session

_SECONDS: Final = 20.0  # every new size has to be compiled


def shrunk(session: "Session", found: Finding) -> Finding:
    """Returns the finding on the smallest input that was found to fail in the same way within 20 s.

    Value classes go back to `normal`, the seed to 0, and each size to one, to a half and to one less, in turns, for as long as
    the same result stays wrong.
    """
    from tpukern.testing import properties

    if found.case is None or found.property != "parity":
        return found
    deadline = time.monotonic() + _SECONDS
    smaller = True
    while smaller:
        smaller = False
        for case in simpler(session, found.case):
            if time.monotonic() > deadline:
                return found
            again = properties.parity(session, case)
            if again is not None and again.key == found.key:
                found, smaller = again, True
                break
    return found


def simpler(session: "Session", case: Case) -> Iterator[Case]:
    """Yields cases that are one step simpler, the largest step first."""
    for name in case.kinds:
        yield dataclasses.replace(case, kinds=FrozenMapping({n: kind for n, kind in case.kinds.items() if n != name}))
    if case.seed:
        yield dataclasses.replace(case, seed=0)
    for name, size in case.point.sizes.items():
        for less in _less(size):
            smaller = dataclasses.replace(case.point, sizes=FrozenMapping({**case.point.sizes, name: less}))
            try:
                signature = smaller.signature(session.kernel)
                session.kernel.bind_signature(signature, smaller.forward)
                if session.gradient and session.kernel.gradient is not None:
                    call = session.kernel.gradient_signature(signature)
                    session.kernel.gradient.bind_signature(call, smaller.backward)
            except TpukernError:
                continue
            yield dataclasses.replace(case, point=smaller)


def _less(size: Any) -> list[Any]:
    if isinstance(size, tuple):
        return [(n,) for n in _less(_product(size))] or ([(1,)] if len(size) > 1 else [])
    return list(dict.fromkeys(n for n in (1, size // 2, size - 1) if 0 < n < size))


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
