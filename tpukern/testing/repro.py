"""Failures that last: a short program that shows one, and a store of inputs that failed before."""

import dataclasses
import importlib
import importlib.util
import inspect
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tpukern.dsl import Config, Kernel
from tpukern.dsl.frozen import FrozenMapping
from tpukern.errors import TpukernError
from tpukern.testing import programs
from tpukern.testing.findings import Finding
from tpukern.testing.strategies import Case, Point

if TYPE_CHECKING:
    from tpukern.testing.properties import Session

STORE: Final = Path(".tpukern") / "regressions"
_KEPT: Final = 50
_LITERAL: Final = 24  # elements that are written out


# --- the script


def script(session: "Session", found: Finding) -> str:
    """Returns a program that shows a finding with nothing but the kernel, jax, numpy and torch; empty if there is none.

    Only wrong results can be shown so. It says in a comment if the fault needs the chip's arithmetic to show, and then has
    the one import of tpukern's test machinery that applies it.
    """
    case = found.case
    if case is None or found.output is None or found.property not in ("parity", "configs_agree", "deterministic"):
        return ""
    where = _import_of(session.kernel)
    if where is None:
        return ""
    plan = programs.plan(session.kernel, case.point, gradient=session.gradient)
    backward = found.output not in {o.name for o in plan.signature.outputs}
    lines = ["import jax, numpy as np, torch", "from tpukern.dsl import using", *where, "rng = np.random.default_rng"]
    names = [*(o.name for o in plan.signature.inputs), *([f"d{n}" for n in plan.cotangents] if backward else [])]
    arrays = dict(zip(names, plan.operands(case), strict=False))
    values = [f"{name}={_value(case, plan, name, array)}" for name, array in arrays.items()]
    lines.append(f"a = dict({', '.join(values)})")
    lines += _call(session, plan, case, found, backward) + _wanted(session, plan, found, backward)
    return "\n".join(lines) + "\n"


def _import_of(kernel: Kernel) -> list[str] | None:
    """Returns the lines that import a kernel under the name `kernel`; None if it has no name in its module."""
    module = inspect.getmodule(kernel.fn)
    if module is None:
        return None
    name = next((n for n, value in vars(module).items() if value is kernel), None)
    if name is None:
        return None
    try:
        importable = module.__name__ != "__main__" and getattr(importlib.import_module(module.__name__), name, None) is kernel
        importable = importable and module.__spec__ is not None and importlib.util.find_spec(module.__name__) is not None
    except (ImportError, ValueError):
        importable = False
    if importable:
        return [f"from {module.__name__} import {name} as kernel"]
    path = Path(inspect.getsourcefile(kernel.fn) or "")
    return [f"import sys; sys.path.insert(0, {str(path.parent)!r})", f"from {path.stem} import {name} as kernel"]


def _value(case: Case, plan: programs.Plan, name: str, array: np.ndarray) -> str:
    """Returns an expression for an array of an input or cotangent."""
    names = [o.name for o in plan.signature.inputs]
    at = names.index(name) if name in names else 100 + plan.cotangents.index(name[1:])
    cast = f'jax.numpy.asarray({{}}, "{array.dtype.name}")'
    if array.size <= _LITERAL:
        return cast.format(repr(array.astype(np.float64).tolist()).replace("nan", "np.nan").replace("inf", "np.inf"))
    drawn = f"rng([{case.seed}, {at}]).standard_normal({array.shape})"
    if np.issubdtype(array.dtype, np.integer):
        low, high = int(array.min()), int(array.max()) + 1
        drawn = f"rng([{case.seed}, {at}]).integers(0, {high}, {array.shape})"
        exact = low >= 0 and np.array_equal(np.random.default_rng([case.seed, at]).integers(0, high, array.shape), array)
        return cast.format(drawn if exact else repr(array.tolist()))
    plain = np.random.default_rng([case.seed, at]).standard_normal(array.shape).astype(array.dtype)
    if np.array_equal(plain, array):
        return cast.format(drawn)
    if (array == array.reshape(-1)[0]).all():
        return cast.format(f"np.full({array.shape}, {float(array.reshape(-1)[0])!r})")
    changed = ~((plain == array) | ((plain != plain) & (array != array)))
    if 0 < changed.sum() <= _LITERAL:  # a few special values among plain ones
        where = tuple(i.tolist() for i in np.nonzero(changed))
        values = repr(array[changed].astype(np.float64).tolist()).replace("nan", "np.nan").replace("inf", "np.inf")
        return cast.format(f"np.put(v := {drawn}, np.ravel_multi_index({where}, {array.shape}), {values}) or v")
    kind = case.kinds.get(name, "normal")
    values = '__import__("tpukern.testing.values", fromlist=["_"]).values'
    return f'{values}("{kind}", {array.shape}, "{array.dtype.name}", [{case.seed}, {at}])'


def _configs(session: "Session", case: Case) -> dict[str, dict[str, Any]]:
    """Returns configs by kernel name, as `using` takes them."""
    kernel, found = session.kernel, {}
    if case.point.forward:
        found[kernel.name] = dict(case.point.forward)
    backward = case.point.backward
    if kernel.gradient is not None and backward:
        own = {key: value for key, value in backward.items() if "." not in key}
        if own:
            found[kernel.gradient.name] = own
        for name in dict.fromkeys(key.partition(".")[0] for key in backward if "." in key):
            found[name] = {**found.get(name, {}), **backward.within(name)}
    return found


def _call(session: "Session", plan: programs.Plan, case: Case, found: Finding, backward: bool) -> list[str]:
    inputs = ", ".join(f'a["{o.name}"]' for o in plan.signature.inputs)
    run = f"run = lambda *x: kernel.run(*x, **{_plain(case.point.statics)})"
    lines = [run]
    if needs_chip(session, plan, case, found):
        lines.append(
            "from tpukern.testing.arithmetic import tpu_arithmetic as on_tpu  # it shows in the chip's arithmetic only"
        )
        wrap = "on_tpu({})"
    else:
        wrap = "{}"
    using = f"with using(interpret=True, configs={_configs(session, case)!r}):"
    outputs = [o.name for o in plan.signature.outputs]
    if not backward:
        call = wrap.format("run") + f"({inputs})[{outputs.index(found.output or '')}]"
        return [*lines, f"{using} got = {call}"]
    given = ", ".join(
        f'a["d{n}"]' if n in plan.cotangents else f"jax.numpy.zeros({o.shape}, '{o.dtype}')"
        for n, o in ((o.name, o) for o in plan.signature.outputs)
    )
    at = [o.name for o in plan.signature.inputs].index((found.output or "")[1:])
    pull = f"lambda *x: jax.vjp(run, *x)[1](({given},))[{at}]"
    return [*lines, f"{using} got = {wrap.format(f'({pull})' if wrap == '{}' else pull)}({inputs})"]


def needs_chip(session: "Session", plan: programs.Plan, case: Case, found: Finding) -> bool:
    """Whether a fault is gone in the CPU's own arithmetic."""
    from tpukern.testing import properties

    try:
        program = programs.Program(plan, None)
        return properties.parity(session, case, program=program) is None
    except Exception:
        return False


def _wanted(session: "Session", plan: programs.Plan, found: Finding, backward: bool) -> list[str]:
    names = [o.name for o in plan.signature.inputs]
    exact = "t = {n: torch.tensor(np.asarray(v, 'float64' if v.dtype.kind not in 'iub' else None)) for n, v in a.items()}"
    statics = _plain(plan.signature.statics)
    inputs = ", ".join(f't["{n}"]' for n in names)
    reference = f"kernel.reference({inputs}, **{statics})"
    several = len([o for o in plan.signature.outputs if o.name not in plan.signature.saved]) > 1
    if not backward:
        at = plan.cotangents.index(found.output or "") if several else None
        want = f"want = {reference}" + (f"[{at}]" if at is not None else "")
    else:
        leaf = f't["{(found.output or "")[1:]}"]'
        exact += f"; {leaf}.requires_grad_()"
        given = ", ".join(f't["d{n}"]' for n in plan.cotangents)
        want = f"want, = torch.autograd.grad({reference}, [{leaf}], [{given}])"
    show = "print('got', np.asarray(got), 'want', want.detach().numpy(), sep='\\n')"
    off = "print('largest difference', np.nanmax(np.abs(np.asarray(got, 'float64') - want.detach().numpy())))"
    return [exact, want, show, off]


def _plain(statics: Mapping[str, Any]) -> str:
    return repr(dict(statics))


# --- the store


def keep(folder: Path, kernel: Kernel, found: Finding) -> None:
    """Adds a failing input to the store, if it can be written down. A folder that cannot be written to is left alone."""
    if found.case is None or found.property not in ("parity", "configs_agree", "deterministic"):
        return
    try:
        entry = json.loads(json.dumps(to_json(found.case)))
        entries = [entry, *(e for e in _entries(folder, kernel) if e != entry)][:_KEPT]
        text = json.dumps({"kernel": kernel.name, "cases": entries}, indent=1)
    except (TypeError, ValueError):
        return  # a static argument that JSON has no form for
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f"{kernel.name}.")
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
        Path(temporary).replace(folder / f"{kernel.name}.json")
    except OSError:
        return


def kept(folder: Path, kernel: Kernel) -> list[Case]:
    """Returns the inputs that failed before and that the kernel still takes, newest first."""
    found = []
    for entry in _entries(folder, kernel):
        try:
            case = from_json(entry)
            case.point.signature(kernel)
        except (TpukernError, KeyError, TypeError, ValueError):
            continue  # the kernel's parameters have changed since
        found.append(case)
    return found


def _entries(folder: Path, kernel: Kernel) -> list[Any]:
    try:
        stored = json.loads((folder / f"{kernel.name}.json").read_text())
        return list(stored["cases"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def to_json(case: Case) -> dict[str, Any]:
    """Returns a case as JSON has it.

    Raises:
        TypeError: A static argument is not a number, text, bool or None.
    """
    point = case.point
    for name, value in point.statics.items():
        if not isinstance(value, str | int | float | bool | None) or (isinstance(value, float) and not math.isfinite(value)):
            raise TypeError(f"static argument {name} is a {type(value).__name__}")
    fields = {f.name: getattr(point, f.name) for f in dataclasses.fields(point)}
    plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()}
    return {**plain, "kinds": dict(case.kinds), "seed": case.seed}


def from_json(entry: Mapping[str, Any]) -> Case:
    """Returns the case that `to_json` wrote."""
    sizes = {name: tuple(size) if isinstance(size, list) else size for name, size in entry["sizes"].items()}
    point = Point(
        dtype=entry["dtype"], sizes=FrozenMapping(sizes), statics=FrozenMapping(entry["statics"]),
        forward=Config(entry["forward"]), backward=Config(entry["backward"]),
    )  # fmt: skip
    return Case(point=point, kinds=FrozenMapping(entry["kinds"]), seed=int(entry["seed"]))
