"""Names of values by content, the same in every process: what static arguments become in a cache key.

A function is named by its code and by what that code reaches: closure, defaults, and the globals it uses, followed through the
user's own modules. A library's function is named by module and name, since the library's version is in the key.
"""

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import os
import sysconfig
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any


class Unkeyable(Exception):
    """A value that has no such name: no error of the user's, a result that depends on it is just not kept."""


def canonical(value: Any) -> str:
    """Returns JSON text that is the same for equal JSON values, in every process."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(value: Any) -> str:
    """Returns the SHA-256 of a JSON value, in hex."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def stable(value: Any) -> Any:
    """Returns a JSON value that names ``value`` by its content.

    Raises:
        Unkeyable: It is neither constant, container, enum, dataclass, dtype, array nor function.
    """
    return _Namer().name(value)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(os.path.realpath(paths[name]) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def is_library(filename: str) -> bool:
    """Whether a file belongs to Python or to an installed package, whose version then speaks for it."""
    return not filename or filename.startswith("<frozen") or os.path.realpath(filename).startswith(_library_folders())


class _Namer:
    """One naming; functions met twice are named by their number, so recursion ends."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def name(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return ["enum", type(value).__module__, type(value).__qualname__, value.name]
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return ["float", value.hex()]
        if isinstance(value, complex | bytes) or value is Ellipsis:
            return [type(value).__name__, repr(value)]
        if isinstance(value, Mapping):
            return ["map", sorted(([self.name(k), self.name(v)] for k, v in value.items()), key=canonical)]
        if isinstance(value, Set):
            return ["set", sorted((self.name(v) for v in value), key=canonical)]
        if isinstance(value, Sequence) and not isinstance(value, bytearray | memoryview):
            return [type(value).__name__, [self.name(v) for v in value]]
        if isinstance(value, type | types.ModuleType):
            return [type(value).__name__, getattr(value, "__module__", ""), value.__name__]
        if dataclasses.is_dataclass(value):
            fields = {f.name: self.name(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return ["record", type(value).__module__, type(value).__qualname__, fields]
        return self._function(value) if callable(value) else self._array(value)

    def _array(self, value: Any) -> Any:
        kind = type(value)
        if hasattr(value, "dtype") and hasattr(value, "tobytes"):  # of numpy or JAX, or a numpy scalar
            return ["array", kind.__module__, str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        if any(base.__name__ == "dtype" for base in kind.__mro__):  # of numpy or torch; numpy names its own classes as it likes
            return ["dtype", str(value)]
        raise Unkeyable(f"{kind.__qualname__} {value!r}")

    def _function(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            return ["partial", self.name(value.func), self.name(value.args), self.name(value.keywords)]
        function = inspect.unwrap(value)
        if isinstance(function, types.MethodType):
            return ["method", self.name(function.__func__), self.name(function.__self__)]
        if isinstance(function, types.FunctionType):
            own = not is_library(function.__code__.co_filename)
            named = ["function", function.__module__, function.__qualname__]
            return [*named, *(self._code_of(function) if own else self._cells(function))]
        if isinstance(function, types.BuiltinFunctionType):
            return ["builtin", function.__module__, function.__qualname__, self.name(function.__self__)]
        place = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
        module = inspect.getmodule(function)
        if place and module is not None and is_library(getattr(module, "__file__", None) or ""):  # a jnp.ufunc
            return ["library", type(function).__qualname__, getattr(function, "__module__", ""), place]
        raise Unkeyable(f"{type(value).__qualname__} {value!r}")

    def _code_of(self, function: types.FunctionType) -> list[Any]:
        if id(function) in self._seen:
            return ["seen", self._seen[id(function)]]
        self._seen[id(function)] = len(self._seen)
        reached = sorted(set(_names(function.__code__)) & function.__globals__.keys())
        used = {name: self._global(function.__globals__[name]) for name in reached}
        defaults = [self.name(function.__defaults__), self.name(function.__kwdefaults__)]
        return [self._body(function.__code__), *defaults, *self._cells(function), used]

    def _global(self, value: Any) -> Any:
        try:
            return self.name(value)
        except Unkeyable:  # such as a logger; its kind and place have to do
            return ["object", type(value).__module__, type(value).__qualname__]

    def _cells(self, function: types.FunctionType) -> list[Any]:
        named = []
        for cell in function.__closure__ or ():
            try:
                contents = cell.cell_contents
            except ValueError:  # not filled yet
                contents = "empty"
            named.append(self.name(contents))
        return [named]

    def _body(self, code: types.CodeType) -> Any:
        constants = [self._body(c) if isinstance(c, types.CodeType) else self.name(c) for c in code.co_consts]
        return [code.co_code.hex(), constants, list(code.co_names), list(code.co_varnames)]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)
