"""The rules that a declaration has to keep, whatever the shapes. Each is one function, in the order they are checked."""

import inspect

import numpy as np

from tpukern.dsl import dims as d
from tpukern.dsl import dtypes
from tpukern.dsl.declaration import RESERVED, Declaration, Parameter, each_output
from tpukern.dsl.roles import Input, Output, ScalarInput, Table
from tpukern.errors import SignatureError, did_you_mean


def check(declaration: Declaration) -> None:
    """Checks every rule.

    Raises:
        SignatureError: One is broken.
    """
    for rule in (_has_output, _names, _dtypes, _blocks, _choices, _axes, _sizes, _dims_used, _lookups, _aliases):
        rule(declaration)
    if declaration.tile:
        for tile_rule in (_two_axes, _groups, _spans):
            tile_rule(declaration)
        check_order(declaration, declaration.grid)


def _has_output(k: Declaration) -> None:
    if not k.outputs:
        raise SignatureError(k.kernel, "there is no Out among the parameters", "one or more")


def _names(k: Declaration) -> None:
    for name in (*(o.name for o in k.operands), *k.dims, *k.choices, *k.statics):
        if name in RESERVED or name.startswith("block_"):
            raise SignatureError(k.kernel, f"a parameter is called {name!r}, a keyword of every call", "another name")


def _dtypes(k: Declaration) -> None:
    for o in k.operands:
        if o.role.dtype is None:
            continue
        if o.role.dtype not in dtypes.KNOWN:
            do = did_you_mean(o.role.dtype, dtypes.KNOWN)
            raise SignatureError(k.kernel, f"{o.name} has dtype {o.role.dtype!r}", f"one of {list(dtypes.KNOWN)}", do)
        if isinstance(o.role, Table) and not dtypes.is_integer(o.role.dtype):
            raise SignatureError(k.kernel, f"table {o.name} has dtype {o.role.dtype!r}", "an integer type")
        value = o.role.fill if isinstance(o.role, Input) else getattr(o.role, "init", None)
        if value is not None and dtypes.is_integer(o.role.dtype) and not _fits(value, o.role.dtype):
            word = "fill" if isinstance(o.role, Input) else "init"
            raise SignatureError(k.kernel, f"{word}={value} of {o.name} is no {o.role.dtype}", "a value of its dtype")


def _fits(value: float, dtype: str) -> bool:
    if dtype == "bool":
        return value in (0, 1)
    info = np.iinfo(dtype) if dtype in np.sctypeDict else None
    return info is None or (value == int(value) and info.min <= value <= info.max)


def _blocks(k: Declaration) -> None:
    for name, dim in k.dims.items():
        if dim.each:
            continue
        if not dim.choices or any(not isinstance(c, int) or c < 1 for c in dim.choices):
            raise SignatureError(k.kernel, f"Block of {name!r} has choices {list(dim.choices)}", "one or more positive sizes")
        if dim.default not in dim.choices:
            raise SignatureError(k.kernel, f"Block of {name!r} has default {dim.default}", f"one of {list(dim.choices)}")


def _choices(k: Declaration) -> None:
    for name, tunable in k.choices.items():
        if not tunable.choices:
            raise SignatureError(k.kernel, f"Choice {name!r} has no values", "one or more")
        if tunable.default not in tunable.choices:
            raise SignatureError(
                k.kernel, f"Choice {name!r} has default {tunable.default!r}", f"one of {list(tunable.choices)}"
            )


def _axes(k: Declaration) -> None:
    for o in k.operands:
        for axis in o.axes[1:]:
            if isinstance(axis, d.Named) and axis.leading:
                raise SignatureError(k.kernel, f"{o} has '*' after the first axis", "'*' on the first axis only")
    stars = sorted({a.name for o in k.operands for a in o.axes if isinstance(a, d.Named) and a.leading})
    if len(stars) > 1:
        rule = "'*' on one dim only, since a call has one set of leading axes"
        raise SignatureError(k.kernel, f"the dims {stars} all have '*'", rule)


def bound_names(k: Declaration) -> set[str]:
    """Returns the dims whose size inputs and static arguments can tell."""
    known = {a.name for o in k.inputs for a in o.axes if isinstance(a, d.Named | d.Lookup)} | set(k.int_statics)
    groups = [a for o in k.inputs for a in o.axes if isinstance(a, d.Group)]
    while True:
        more = {n for g in groups for n in g.names if sum(x not in known for x in g.names) == 1} - known
        if not more:
            return known
        known |= more


def _sizes(k: Declaration) -> None:
    known = bound_names(k)
    everywhere = {name for o in k.inputs for name in o.names}
    for o in k.operands:
        for axis in o.axes:
            for name in d.names_of(axis):
                if name in known:
                    continue
                if name in everywhere:
                    found = f"the size of {name!r} in {o} cannot be told"
                    rule = f"an axis {name} of an input, or a static int"
                    if isinstance(axis, d.Group):
                        rule = "every dim but one of a group to be an axis of its own of an input, or a static int"
                    raise SignatureError(k.kernel, found, rule)
                choices = sorted(everywhere.union(k.int_statics))
                found = f"dim {name!r} of {o} is on no input and no static argument"
                raise SignatureError(k.kernel, found, f"one of {choices}", did_you_mean(name, choices))


def _dims_used(k: Declaration) -> None:
    used = sorted({name for o in k.operands for name in (*o.names, *o.walked_by)})
    for name, dim in k.dims.items():
        if name not in used:
            found = f"{name!r} has {'an Each' if dim.each else 'a Block'} but no operand has that dim"
            raise SignatureError(k.kernel, found, f"one of {used}", did_you_mean(name, used))


def _lookups(k: Declaration) -> None:
    tables = {o.name: o for o in k.tables}
    for o, axis in k.lookups:
        if axis.table not in tables:
            do = did_you_mean(axis.table, tables)
            raise SignatureError(k.kernel, f"{o} looks up in {axis.table!r}", f"one of the Prefetch tables {list(tables)}", do)
        if axis.name not in k.dims:
            found = f"{axis.name!r} of {o} has neither Block nor Each"
            raise SignatureError(k.kernel, found, "one of them, to say how much a table entry stands for")
        _lookup_indices(k, o, axis, tables[axis.table])
    looked_up = {axis.name for _, axis in k.lookups}
    for o in k.operands:
        for plain in o.axes if isinstance(o.role, Input | Output) else ():
            for name in () if isinstance(plain, d.Lookup) else d.names_of(plain):
                if name in looked_up and name not in k.grid:
                    found = f"{name!r} is looked up in a table on one operand and plain on {o}"
                    raise SignatureError(k.kernel, found, "a table on every operand, since a looked-up dim has no grid index")


def _lookup_indices(k: Declaration, o: Parameter, axis: d.Lookup, table: Parameter) -> None:
    if len(table.axes) != len(axis.at):
        found = f"{o} looks up {axis.table} with {len(axis.at)} indices"
        raise SignatureError(k.kernel, found, f"{len(table.axes)}, one for each axis of {table}")
    for at, entry in zip(axis.at, table.axes, strict=True):
        if at not in k.grid:
            raise SignatureError(k.kernel, f"{at!r} in {axis} of {o} is no grid dim", f"one of {list(k.grid)}")
        if not k.dims[at].each and isinstance(entry, d.Named) and entry.name == at:
            found = f"{axis} of {o} takes the index of a block of {at!r}, but {table} has an entry for each {at}"
            raise SignatureError(k.kernel, found, f"an Each, or {at}/<block> in the table's dims")


def _aliases(k: Declaration) -> None:
    for o, role in each_output(k):
        if role.alias is None:
            continue
        source = k.operand(role.alias)
        if source is None or not isinstance(source.role, Input):
            inputs = [x.name for x in k.inputs if isinstance(x.role, Input)]
            do = did_you_mean(role.alias, inputs)
            raise SignatureError(k.kernel, f"output {o} is written over {role.alias!r}", f"an In, one of {inputs}", do)
        if source.axes != o.axes or source.role.dtype != role.dtype:
            raise SignatureError(k.kernel, f"output {o} is written over {source}", "the same dims and dtype")


def _two_axes(k: Declaration) -> None:
    for o in k.operands:
        if isinstance(o.role, ScalarInput | Table):
            continue
        left = [a for a in o.axes if not _squeezed(k, a)]
        if len(left) < 2:
            raise SignatureError(
                k.kernel,
                f"{o} leaves a block of {len(left)} axes",
                "two or more",
                "Write '_' for an axis of size one: before the last dim for a row (compact; XLA copies it if the array has "
                "rank > 1), after it for a column (any block of 8, 128 x the bytes).",
            )


def _squeezed(k: Declaration, axis: d.Axis) -> bool:
    names = d.names_of(axis)
    return bool(names) and all(name in k.dims and k.dims[name].each for name in names)


def _groups(k: Declaration) -> None:
    for o in k.operands:
        for axis in o.axes:
            if not isinstance(axis, d.Group) or not any(name in k.dims for name in axis.names):
                continue
            wrong = [name for name in axis.names[:-1] if name not in k.dims or not k.dims[name].each]
            if wrong:
                found = f"{wrong[0]!r} of {axis} in {o} is not walked by Each"
                raise SignatureError(k.kernel, found, "Each for all dims of a group but the last, or no grid dim in it")


def _spans(k: Declaration) -> None:
    for name, dim in k.dims.items():
        if dim.span is None:
            continue
        known = [*(g for g in k.grid if g != name), *k.statics, *(o.name for o in k.tables)]
        for wanted in inspect.signature(dim.span).parameters:
            if wanted not in known:
                found = f"the span of {name!r} wants {wanted!r}"
                raise SignatureError(k.kernel, found, f"one of {known}", did_you_mean(wanted, known))
        if name not in k.grid:
            raise SignatureError(k.kernel, f"{name!r} has a span but is looked up in a table", "a grid dim")
        for o in k.outputs:
            if name in o.walked_by:
                found = f"output {o} names {name!r}, which has a span"
                raise SignatureError(k.kernel, found, "spans on summed dims only, since steps outside of a span write nothing")


def check_order(k: Declaration, order: tuple[str, ...]) -> None:
    """Checks that the blocks of each output are revisited in a row when the grid is walked in this order.

    Raises:
        SignatureError: An output lacks a dim that is outside one it names.
    """
    broken = order_breach(k, order)
    if broken:
        raise SignatureError(k.kernel, *broken)


def order_breach(k: Declaration, order: tuple[str, ...]) -> tuple[str, str, str] | None:
    """Returns what is wrong with walking the grid in this order, or None."""
    for o in k.outputs:
        named = [name for name in order if name in o.walked_by]
        lacks = [name for name in order if name not in o.walked_by]
        for missing in lacks:
            if named and order.index(missing) < order.index(named[-1]):
                return (
                    f"output {o} lacks {missing!r}, which is outside {named[-1]!r} in the grid {order}",
                    "dims that an output lacks to be innermost, since its blocks must be revisited in a row",
                    f"Put {missing} after {named[-1]}, or write partial results with {missing} as an axis.",
                )
    for o in k.scratch:
        usual, here = k.summed(o, k.grid), k.summed(o, order)
        if set(usual) != set(here):
            return (
                f"{o} would last over {_listed(here)} in the grid {order}",
                f"it to last over {_listed(usual)}, as in the grid {k.grid} that it was written for",
                "",
            )
    return None


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(names) or "one step"
