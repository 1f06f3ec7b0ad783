"""Which source a kernel depends on, so that a cached result of other source is never taken for its own."""

import functools
import hashlib
import importlib.util
import inspect
import pathlib
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from typing import Any

_PLAIN = (int, float, complex, str, bytes, bool, type(None))


@functools.cache
def _library_folders() -> tuple[pathlib.Path, ...]:
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.update(site.getsitepackages() if hasattr(site, "getsitepackages") else ())
    folders.add(site.getusersitepackages())
    return tuple(pathlib.Path(folder).resolve() for folder in folders if folder)


@functools.cache
def _dsl_files() -> tuple[pathlib.Path, ...]:
    return tuple(sorted(pathlib.Path(__file__).resolve().parent.glob("*.py")))


def files(functions: tuple[Callable[..., Any], ...]) -> tuple[pathlib.Path, ...]:
    """Returns the files that the functions' behaviour depends on, sorted.

    They are the functions' own modules, the modules outside of any library that those reach through their globals, and the
    kernel language itself.
    """
    found: dict[pathlib.Path, None] = {}
    todo = [module for function in functions if (module := _module_of(function))]
    seen: set[str] = set()
    while todo:
        module = todo.pop()
        if module.__name__ in seen:
            continue
        seen.add(module.__name__)
        path = _own_file(module)
        if path is None:
            continue
        found[path] = None
        todo.extend(_reached(module))
    return tuple(sorted({*found, *_dsl_files()}))


def _module_of(value: Any) -> types.ModuleType | None:
    if isinstance(value, types.ModuleType):
        return value
    name = getattr(value, "__module__", None)
    return sys.modules.get(name) if isinstance(name, str) else None


def _reached(module: types.ModuleType) -> Iterator[types.ModuleType]:
    for value in list(vars(module).values()):
        other = _module_of(value)
        if other is not None and other is not module:
            yield other


def _own_file(module: types.ModuleType) -> pathlib.Path | None:
    """Returns a module's source file, unless it belongs to a library, to Python or to the kernel language."""
    name = getattr(module, "__file__", None)
    if not name or not name.endswith(".py"):
        return None
    path = pathlib.Path(name).resolve()
    if not path.is_file() or path in _dsl_files() or module.__name__.partition(".")[0] in sys.stdlib_module_names:
        return None
    if module.__name__.startswith("tpukern.") and not module.__name__.startswith("tpukern.kernels."):
        return None
    if any(path.is_relative_to(folder) for folder in _library_folders()) and not module.__name__.startswith("tpukern."):
        return None
    return path


def digest(functions: tuple[Callable[..., Any], ...], declared: str) -> str:
    """Returns the digest of all that the functions' behaviour depends on.

    Args:
        functions: Body, span functions and the like.
        declared: What the declaration says beyond the source (a kernel made in a function may get it from variables).
    """
    state = hashlib.sha256(declared.encode())
    for path in files(functions):
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for function in functions:
        _add_values(state, function, set())
    return state.hexdigest()


def _add_values(state: Any, function: Any, seen: set[int]) -> None:
    """Adds what the files do not show: closures, plain globals as they stand, and code that has no file."""
    if not isinstance(function, types.FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    state.update(f"{function.__module__}.{function.__qualname__}".encode())
    if not pathlib.Path(function.__code__.co_filename).is_file():
        _add_code(state, function.__code__)
    outside = inspect.getclosurevars(function)
    for name, value in sorted({**outside.globals, **outside.nonlocals}.items()):
        state.update(name.encode())
        _add_value(state, value, seen)
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        _add_value(state, value, seen)


def _add_value(state: Any, value: Any, seen: set[int]) -> None:
    if isinstance(value, _PLAIN):
        state.update(repr(value).encode())
    elif isinstance(value, tuple | list):
        for item in value:
            _add_value(state, item, seen)
    elif isinstance(value, types.FunctionType):
        module = sys.modules.get(value.__module__)
        if module is None or not _is_library(module):
            _add_values(state, value, seen)


def _is_library(module: types.ModuleType) -> bool:
    spec = importlib.util.find_spec(module.__name__.partition(".")[0]) if module.__name__ != "__main__" else None
    name = (spec.origin if spec else None) or getattr(module, "__file__", None)
    return name is not None and any(pathlib.Path(name).resolve().is_relative_to(folder) for folder in _library_folders())


def _add_code(state: Any, code: types.CodeType) -> None:
    state.update(code.co_code + repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _add_code(state, constant)
        else:
            state.update(repr(constant).encode())
