"""Index maps as Python text, and which grid dimensions they depend on."""

from collections.abc import Sequence
from typing import Any

from tpukern import jax_adapter

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "and": "&", "or": "|", "xor": "^", "shift_left": "<<", "shift_right_arithmetic": ">>", "shift_right_logical": ">>",
    "floor_divide": "//", "remainder": "%",
}  # fmt: skip
_CALLS = {"div": "div", "rem": "rem", "max": "max", "min": "min", "clip": "clip", "not": "~", "neg": "-", "abs": "abs"}
_UNCHANGED = ("convert_element_type", "stop_gradient", "copy", "squeeze", "broadcast_in_dim", "reshape")


def default_names(rank: int) -> tuple[str, ...]:
    """Returns names for grid dimensions that have none: i, j, k, ... or g0, g1, ... for more than six."""
    return tuple("ijklmn"[:rank]) if rank <= 6 else tuple(f"g{axis}" for axis in range(rank))


def render(index_map: Any, grid_rank: int, grid_names: Sequence[str] = (), table_names: Sequence[str] = ()) -> str:
    """Returns an index map's closed jaxpr as a tuple expression."""
    jaxpr = index_map.jaxpr
    names = list(grid_names or default_names(grid_rank))
    tables = len(jaxpr.invars) - grid_rank
    names += list(table_names or (f"t{number}" for number in range(tables)))
    values = dict(zip(jaxpr.invars, names, strict=True))
    values.update((v, str(c)) for v, c in zip(jaxpr.constvars, index_map.consts, strict=True))
    parts = _evaluate(jaxpr, values)
    return f"({', '.join(map(_bare, parts))}{',' if len(parts) == 1 else ''})"


def _evaluate(jaxpr: Any, values: dict[Any, str]) -> list[str]:
    def text(atom: Any) -> str:
        return str(atom.val.item() if hasattr(atom.val, "item") else int(atom.val)) if hasattr(atom, "val") else values[atom]

    for equation in jaxpr.eqns:
        name = equation.params.get("name", "") if equation.primitive.name in ("pjit", "jit") else equation.primitive.name
        arguments = [text(atom) for atom in equation.invars]
        inner = [j for value in equation.params.values() for j in jax_adapter.inner_jaxprs(value)]
        if name in _INFIX and len(arguments) == 2:
            results = [f"({arguments[0]} {_INFIX[name]} {arguments[1]})"]
        elif name in _UNCHANGED:
            results = arguments[:1]
        elif name in _CALLS:
            results = [f"{_CALLS[name]}({', '.join(map(_bare, arguments))})"]
        elif name == "select_n" and len(arguments) == 3:
            no, yes = (a if " if " in a else _bare(a) for a in arguments[1:])
            results = [f"({yes} if {_bare(arguments[0])} else {no})"]
        elif name == "get":
            indices = (_bare(text(i)) if hasattr(i, "aval") else str(i) for i in jax_adapter.read_indices(equation))
            results = [f"{arguments[0]}[{', '.join(indices)}]"]
        elif len(inner) == 1 and len(inner[0].invars) == len(arguments) and not inner[0].constvars:
            results = _evaluate(inner[0], dict(zip(inner[0].invars, arguments, strict=True)))
        else:
            results = [f"{name or equation.primitive.name}({', '.join(map(_bare, arguments))})"] * len(equation.outvars)
        values.update(zip(equation.outvars, results, strict=True))
    return [text(atom) for atom in jaxpr.outvars]


def _bare(text: str) -> str:
    """Drops the parentheses around a whole expression."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and place < len(text) - 1:
            return text
    return text[1:-1]


def dependencies(jaxpr: Any, grid_rank: int) -> tuple[int, ...]:
    """Returns the grid dimensions that reach an index map's results."""
    reach: dict[Any, frozenset[int]] = {v: frozenset([a]) for a, v in enumerate(jaxpr.invars[:grid_rank])}

    def of(atom: Any) -> frozenset[int]:
        return frozenset() if hasattr(atom, "val") else reach.get(atom, frozenset())

    for equation in jaxpr.eqns:
        joined = frozenset().union(*(of(atom) for atom in equation.invars))
        reach.update((variable, joined) for variable in equation.outvars)
    return tuple(sorted(frozenset().union(*(of(atom) for atom in jaxpr.outvars))))
