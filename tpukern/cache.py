"""Results of compiles on disk, under a name made of everything they depend on.

An entry is one JSON file with its key and a checksum inside. It is written beside its place and renamed into it, so a reader
sees a whole entry or none, after kill -9 too; whatever does not check is removed and counts as a miss. Two processes that
compile the same thing both write the same entry, one after the other, without a lock that could be left behind.

Why not a ready-made store: diskcache keeps all entries in one SQLite file, which needs a writable folder to be read at all and
is lost as a whole when corrupt; filelock only solves a problem that atomic renames do not have.
"""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib.util
import inspect
import json
import os
import pathlib
import platform
import sysconfig
import tempfile
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from tpukern import environment

_FORMAT = 1
_PRUNE_EVERY = 64  # writes
_STALE_TEMP_S = 3600.0


class Unkeyable(Exception):
    """A static argument whose meaning cannot be put into a key: no error of the user's, the result is just not kept."""


def canonical(value: Any) -> str:
    """Returns JSON text that is the same for equal values, in every process."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=True)


def digest(value: Any) -> str:
    """Returns the SHA-256 of a JSON value, in hex."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def stable(value: Any) -> Any:
    """Returns a JSON value that names ``value`` by its content: constants, containers, dtypes, functions by their code.

    Raises:
        Unkeyable: It is none of these, so two different values could look alike.
    """
    if isinstance(value, enum.Enum):
        return ["enum", type(value).__module__, type(value).__qualname__, value.name]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return ["float", value.hex()]
    if isinstance(value, Mapping):
        return ["map", sorted(([stable(k), stable(v)] for k, v in value.items()), key=canonical)]
    if isinstance(value, Set):
        return ["set", sorted(canonical(stable(v)) for v in value)]
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [type(value).__name__, [stable(v) for v in value]]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: stable(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return ["record", type(value).__module__, type(value).__qualname__, fields]
    if isinstance(value, type):
        return ["type", value.__module__, value.__qualname__]
    if isinstance(value, functools.partial):
        return ["partial", stable(value.func), stable(value.args), stable(value.keywords)]
    if callable(value) or type(value).__module__.split(".")[0] in ("numpy", "ml_dtypes", "jax"):
        return _stable_callable_or_number(value)
    raise Unkeyable(f"{type(value).__qualname__} {value!r}")


def _stable_callable_or_number(value: Any) -> Any:
    function = inspect.unwrap(value) if callable(value) else value
    if isinstance(function, types.BuiltinFunctionType):
        return ["builtin", function.__module__, function.__qualname__]
    if isinstance(function, types.FunctionType):
        if is_library(function.__code__.co_filename):
            return ["function", function.__module__, function.__qualname__, [_cell(c) for c in function.__closure__ or ()]]
        return ["function", function.__module__, function.__qualname__, _code(function)]
    kind = [type(value).__module__, type(value).__qualname__]
    if kind[0].startswith("numpy") and hasattr(value, "dtype") and hasattr(value, "tobytes"):  # scalar or array
        return ["array", str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if "dtype" in kind[1].lower():
        return ["dtype", str(value)]
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if name and "<" not in name and is_library(getattr(inspect.getmodule(value), "__file__", "") or ""):  # a jnp.ufunc
        return ["library", *kind, getattr(value, "__module__", ""), name]
    raise Unkeyable(f"{kind[1]} {value!r}")


def _cell(cell: Any) -> Any:
    try:
        return stable(cell.cell_contents)
    except ValueError:  # empty: the function refers to itself
        return "empty"


def _code(function: types.FunctionType) -> Any:
    """Code, defaults, closure, and what the code's global names lead to, once each."""
    seen: dict[types.FunctionType, int] = {}

    def constant(value: Any) -> Any:
        return body(value) if isinstance(value, types.CodeType) else repr(value)

    def body(code: types.CodeType) -> Any:
        return [code.co_code.hex(), [constant(c) for c in code.co_consts], list(code.co_names), list(code.co_varnames)]

    def names(code: types.CodeType) -> Iterator[str]:
        yield from code.co_names
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                yield from names(inner)

    def visit(value: Any) -> Any:
        if not isinstance(value, types.FunctionType) or is_library(value.__code__.co_filename):
            return ["module", value.__name__] if isinstance(value, types.ModuleType) else stable(value)
        if value in seen:
            return ["seen", seen[value]]
        seen[value] = len(seen)
        reached = sorted(set(names(value.__code__)) & value.__globals__.keys())
        used = {name: visit(value.__globals__[name]) for name in reached}
        cells = [_cell(c) for c in value.__closure__ or ()]
        return [body(value.__code__), stable(value.__defaults__), stable(value.__kwdefaults__), cells, used]

    return visit(function)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(os.path.realpath(paths[name]) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def is_library(filename: str) -> bool:
    """Whether a file belongs to Python or to an installed package, whose version then speaks for it."""
    return not filename or filename.startswith("<frozen") or os.path.realpath(filename).startswith(_library_folders())


@functools.cache
def road_digest() -> str:
    """Digest of tpukern's own sources between a kernel and its machine code."""
    folder = pathlib.Path(__file__).parent
    names = ("jax_adapter.py", "lowering.py", "compiling.py", "worker.py", "targets.py", "environment.py")
    files = sorted([*(folder / n for n in names), *(folder / "dsl").glob("*.py")])
    return digest([[f.name, hashlib.sha256(f.read_bytes()).hexdigest()] for f in files])


def interpreter() -> str:
    """The Python that traces: implementation and version."""
    return f"{platform.python_implementation()} {platform.python_version()}"


class Cache:
    """A folder of results, bounded in size; the entries read or written longest ago go first.

    Args:
        folder: Where; made when first written to. None: ``environment.cache_folder()``.
        limit_bytes: How much; None: ``environment.cache_limit_bytes()``.

    Attributes:
        problem: Why results cannot be kept, once that has been found out; else None.
    """

    def __init__(self, folder: pathlib.Path | None = None, limit_bytes: int | None = None) -> None:
        self.folder = environment.cache_folder() if folder is None else folder
        self.limit_bytes = environment.cache_limit_bytes() if limit_bytes is None else limit_bytes
        self.problem: str | None = None
        self._writes = 0

    def path(self, key: Mapping[str, Any]) -> pathlib.Path:
        """Returns the file that the result for ``key`` is in, if it is there."""
        name = digest(key)
        return self.folder / "compiled" / name[:2] / f"{name}.json"

    def get(self, key: Mapping[str, Any]) -> Any:
        """Returns the value kept for ``key``, or None. A file that does not check is removed."""
        path = self.path(key)
        try:
            text = path.read_bytes()
        except OSError:
            return None
        try:
            entry = json.loads(text)
            body = entry["body"]
            good = entry["sha256"] == digest(body) and body["format"] == _FORMAT and body["key"] == json.loads(canonical(key))
        except (ValueError, KeyError, TypeError, RecursionError):
            good = False
        if not good:
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return body["value"]

    def put(self, key: Mapping[str, Any], value: Any) -> None:
        """Keeps ``value`` (JSON) for ``key``. A folder that cannot be written is warned of once, and does no harm."""
        body = {"format": _FORMAT, "key": key, "value": value}
        try:
            self._write(self.path(key), canonical({"body": body, "sha256": digest(body)}).encode())
        except OSError as error:
            self._warn(error)
            return
        self._writes += 1
        if self._writes % _PRUNE_EVERY == 1:
            self.prune()

    def _write(self, path: pathlib.Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _warn(self, error: OSError) -> None:
        if self.problem is None:
            self.problem = f"{self.folder} cannot be written: {error.strerror or error}"
            warnings.warn(
                f"tpukern[cache]: {self.problem}; results are not kept. Mend it, or set TPUKERN_CACHE_DIR.",
                RuntimeWarning,
                stacklevel=4,
            )

    def _files(self) -> list[tuple[float, int, pathlib.Path]]:
        found = []
        for path in (self.folder / "compiled").glob("*/*"):
            with contextlib.suppress(OSError):  # another process pruned it
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        return found

    def prune(self) -> None:
        """Removes what writers that were killed left, and the oldest entries until the rest fits ``limit_bytes``."""
        entries = []
        for mtime, size, path in self._files():
            if path.suffix != ".tmp":
                entries.append((mtime, size, path))
            elif time.time() - mtime > _STALE_TEMP_S:
                with contextlib.suppress(OSError):
                    path.unlink()
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.limit_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size

    def size(self) -> tuple[int, int]:
        """Returns how many entries there are, and their size in bytes."""
        sizes = [size for _, size, path in self._files() if path.suffix != ".tmp"]
        return len(sizes), sum(sizes)

    def check(self) -> str | None:
        """Returns why the folder cannot be written, or None: writes and removes a small file."""
        probe = self.folder / "compiled" / ".probe"
        try:
            self._write(probe, b"probe")
            probe.unlink()
        except OSError as error:
            return f"{self.folder} cannot be written: {error.strerror or error}"
        return None


def installed(package: str) -> bool:
    """Whether a package can be imported, found out without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
