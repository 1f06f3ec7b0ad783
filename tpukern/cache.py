"""Results of compiles on disk, under a name made of everything they depend on.

An entry is one JSON file with its key and a checksum inside. It is written beside its place and renamed into it, so a reader
sees a whole entry or none, after kill -9 too; whatever does not check is removed and counts as a miss. Two processes that
compile the same thing both write the same entry, one after the other, without a lock that could be left behind.

Why not a ready-made store: diskcache keeps all entries in one SQLite file, which needs a writable folder to be read at all and
is lost as a whole when corrupt; filelock only solves a problem that atomic renames do not have.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import platform
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from tpukern import environment
from tpukern.value_names import canonical, digest

_FORMAT = 1
_PRUNE_EVERY = 64  # writes
_STALE_TEMP_S = 3600.0


def _road_files() -> list[pathlib.Path]:
    folder = pathlib.Path(__file__).parent
    adapters = ("jax_adapter.py", "helion_adapter.py", "helion_host.py")
    names = (*adapters, "lowering.py", "compiling.py", "worker.py", "targets.py", "environment.py")
    return sorted([*(folder / name for name in names), *(folder / "dsl").glob("*.py")])


@functools.cache
def road_digest() -> str:
    """Digest of tpukern's own sources between a kernel and its machine code."""
    return digest([[f.name, hashlib.sha256(f.read_bytes()).hexdigest()] for f in _road_files()])


def is_outdated(kernel: Any) -> bool:
    """Whether a source file that a kernel's code comes from was changed after this process had loaded it.

    What runs is then not what the digests of the files say, so its results must be neither looked up nor kept.
    """
    own: Iterable[pathlib.Path] = getattr(kernel, "source_files", tuple)()
    declared_at = getattr(kernel, "declared_at", environment.LOADED_AT)
    return _changed(_road_files(), environment.LOADED_AT) or _changed(own, declared_at)


def _changed(files: Iterable[pathlib.Path], since: float) -> bool:
    for file in files:
        try:
            changed_at = file.stat().st_mtime
        except OSError:
            return True
        if since < changed_at <= time.time():  # a time to come is another machine's clock
            return True
    return False


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
