"""Traced programs written so that two ways of writing the same operations read alike.

Operations without effects stand where their results are used: their order, doubles and those that nothing uses make no
difference. What has effects (reads and writes of a kernel's memory, copies, loops around these) keeps its order. Constants are
compared by their bytes, index maps as programs.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from jax.extend import core

_PLACES: Final = re.compile(r"(?:at )?[^\s=\[\]()]*\.py:\d+(?::\d+)?")
_RULES: Final = (
    "jvp_jaxpr_fun",
    "fwd_jaxpr_thunk",
    "bwd",
    "debug_info",
    "name_and_src_info",
)  # of no effect on values, or names


def digest(closed: core.ClosedJaxpr) -> str:
    """Returns a digest that two programs share only if they compute the same by the same operations."""
    return _hash(_open(closed.jaxpr), _bytes(closed.consts))


def without_places(text: str) -> str:
    """Returns a text without the names and lines of source files in it."""
    return _PLACES.sub("", text)


def _hash(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _bytes(consts: Sequence[Any]) -> list[Any]:
    return [(str(np.asarray(c).dtype), np.shape(c), np.asarray(c).tobytes().hex()) for c in consts]


def _open(jaxpr: Any) -> str:
    known: dict[Any, str] = {}
    for group, variables in (("constant", jaxpr.constvars), ("operand", jaxpr.invars)):
        known |= {v: f"{group} {n} {v.aval}" for n, v in enumerate(variables)}
    steps: list[str] = []

    def value(atom: Any) -> str:
        if hasattr(atom, "val"):  # a literal
            return _hash(str(atom.aval), _bytes([atom.val]))
        return known[atom]

    for eqn in jaxpr.eqns:
        params = [(name, _parameter(v)) for name, v in sorted(eqn.params.items()) if name not in _RULES]
        what = _hash(eqn.primitive.name, params, [value(a) for a in eqn.invars], [str(v.aval) for v in eqn.outvars])
        if eqn.effects or not eqn.outvars or any(hasattr(a.aval, "inner_aval") for a in eqn.invars):
            what = _hash(what, len(steps))  # a read at another time is another read
            steps.append(what)
        known |= {v: f"{what} {n}" for n, v in enumerate(eqn.outvars)}
    return _hash(steps, [value(a) for a in jaxpr.outvars], [str(v.aval) for v in jaxpr.invars])


def _parameter(given: Any) -> Any:
    if isinstance(given, core.ClosedJaxpr):
        return digest(given)
    if isinstance(given, core.Jaxpr):
        return _open(given)
    if type(given) in (tuple, list):
        return [_parameter(v) for v in given]
    if isinstance(given, np.ndarray):
        return _bytes([given])
    blocks = getattr(given, "block_mappings", None)  # a grid and its index maps, which JAX does not print
    maps = [_parameter(b.index_map_jaxpr) for b in blocks] if blocks is not None else []
    return without_places(str(given)), maps
