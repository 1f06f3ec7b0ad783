"""What the words on the command line mean: kernels, workloads, targets, shapes and configs."""

import contextlib
import importlib
import importlib.util
import re
import sys
import traceback
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpukern.errors import ConfigError, TpukernError, did_you_mean
from tpukern.targets import TARGETS, Target, target

if TYPE_CHECKING:
    from tpukern.dsl import Kernel, Workload

DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "fp32": "float32", "fp16": "float16"}
LEADING = re.compile(r"\d+(x\d+)+")
LITERALS = {"true": True, "false": False, "none": None}


def shipped() -> "dict[str, Kernel]":
    """Returns the kernels that come with tpukern, by name."""
    return kernels_in(importlib.import_module("tpukern.kernels"))


def kernels_in(module: types.ModuleType) -> "dict[str, Kernel]":
    """Returns the kernels among a module's names that are nobody's backward, in the order of ``__all__`` or of definition."""
    from tpukern.dsl import Kernel

    names = getattr(module, "__all__", vars(module))
    found = {name: value for name in names if isinstance(value := getattr(module, name, None), Kernel)}
    backwards = {id(kernel.gradient) for kernel in found.values() if kernel.gradient is not None}
    return {name: kernel for name, kernel in found.items() if id(kernel) not in backwards}


def find_kernels(name: str) -> "list[Kernel]":
    """Returns the kernels called ``name``: all that ship, one of them, or a user's (``file.py:name``, ``module:name``)."""
    if name == "all":
        return list(shipped().values())
    return [find_kernel(name)]


def find_kernel(name: str) -> "Kernel":
    """Returns one kernel.

    Raises:
        ConfigError: There is none of that name, or its module does not import.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon:
        known = shipped()
        if name in known:
            return known[name]
        if name.endswith(".py"):
            raise ConfigError("kernel", f"{name!r} names a file and no kernel in it", f"{name}:NAME")
        raise ConfigError(
            "kernel", f"no kernel {name!r}", f"one of {list(known)}, FILE.py:NAME or MODULE:NAME", did_you_mean(name, known)
        )
    module = import_file(Path(place)) if place.endswith(".py") else import_module(place)
    from tpukern.dsl import Kernel

    found = getattr(module, attribute, None)
    if isinstance(found, Kernel):
        return found
    known = kernels_in(module)
    what = "no kernel" if found is None else f"{type(found).__name__}, not a kernel, under"
    rule = f"one of {list(known)}" if known else "a @tpukern.kernel"
    raise ConfigError("kernel", f"{what} {attribute!r} in {place}", rule, did_you_mean(attribute, known))


def import_file(path: Path) -> types.ModuleType:
    """Imports a file by its path, with its folder first on ``sys.path``, as python would run it."""
    named = str(path)
    if not path.is_file():
        raise ConfigError("kernel", f"no file {named!r}", "a Python file")
    path = path.resolve()
    name = path.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
        name = f"tpukern_user_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file always has a spec"
    assert spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    with imported(named):
        spec.loader.exec_module(module)
    return module


def import_module(name: str) -> types.ModuleType:
    """Imports a module by name, the current folder being first on ``sys.path``, as for ``python -m``."""
    sys.path.insert(0, "")
    with imported(name):
        return importlib.import_module(name)


@contextlib.contextmanager
def imported(what: str) -> Any:
    """Turns what a user's module raises into one message, and keeps what it prints off stdout."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except TpukernError:
        raise
    except (Exception, SystemExit) as e:
        last = traceback.extract_tb(e.__traceback__)[-1]
        where = "" if last.filename.startswith("<frozen") else f" ({Path(last.filename).name} line {last.lineno})"
        raise ConfigError("kernel", f"importing {what} raised {type(e).__name__}: {e}{where}", "a module that imports") from e


def find_targets(text: str) -> list[Target]:
    """Returns the targets of ``v5e,v6e``; ``all`` is every one."""
    if text == "all":
        return list(TARGETS.values())
    return list(dict.fromkeys(target(name.strip()) for name in text.split(",")))


def find_workloads(kernels: "Sequence[Kernel]", name: str | None) -> "dict[str, list[Workload]]":
    """Returns for each kernel the workload ``name``, or all of them.

    Raises:
        ConfigError: No kernel has a workload of that name, or the only kernel has no workloads.
    """
    if name is None:
        found = {kernel.name: list(kernel.workloads) for kernel in kernels}
        if len(kernels) == 1 and not kernels[0].workloads:
            raise ConfigError(kernels[0].name, "no workload is declared", "a shape", "Give one with --shape.")
        return found
    found = {kernel.name: [w for w in kernel.workloads if w.name == name] for kernel in kernels}
    if not any(found.values()):
        known = list(dict.fromkeys(w.name for kernel in kernels for w in kernel.workloads))
        subject = kernels[0].name if len(kernels) == 1 else "all"
        rule, do = (f"one of {known}", did_you_mean(name, known)) if known else ("a shape", "Give one with --shape.")
        raise ConfigError(subject, f"no workload {name!r}", rule, do)
    return found


def find_dtype(kernel: "Kernel", name: str) -> str:
    """Returns the full name of an element type that the kernel has."""
    full = DTYPES.get(name, name)
    if full not in kernel.dtypes:
        raise ConfigError(kernel.name, f"no dtype {name!r}", f"one of {list(kernel.dtypes)}", did_you_mean(full, kernel.dtypes))
    return full


def parse_shape(subject: str, text: str) -> dict[str, Any]:
    """Reads ``m=128,k=256,causal=true``: sizes and static arguments by name."""
    values: dict[str, Any] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not name.isidentifier() or not value:
            raise ConfigError(subject, f"cannot read {item.strip()!r} in --shape {text!r}", "NAME=VALUE,NAME=VALUE")
        if name in values:
            raise ConfigError(subject, f"{name!r} twice in --shape {text!r}", "each name once")
        values[name] = literal(value)
    return values


def literal(text: str) -> int | float | bool | str | tuple[int, ...] | None:
    """Returns what ``text`` spells: an int, a float, true, false, none, leading axes as ``4x128``, or the string itself."""
    if text.lower() in LITERALS:
        return LITERALS[text.lower()]
    if LEADING.fullmatch(text):
        return tuple(int(size) for size in text.split("x"))
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def known_keys(keys: Iterable[str], spaces: Iterable[Iterable[str]], subject: str) -> None:
    """Checks that every config key is in one of the config spaces.

    Raises:
        ConfigError: A key is in none.
    """
    known = list(dict.fromkeys(key for space in spaces for key in space))
    for key in keys:
        if key not in known:
            raise ConfigError(subject, f"no config key {key!r}", f"one of {known}", did_you_mean(key, known))
