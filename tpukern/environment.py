"""The only reader and writer of ``os.environ``: where things are kept, and what the processes that load libtpu must see.

Functions, not state: a variable changed while the process runs is seen by the next call.
"""

import contextlib
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping

from tpukern.errors import ConfigError

LOADED_AT = time.time()  # seconds since the epoch; everything of tpukern that traces is imported after this module

_REMOVED_FROM_WORKERS = (
    "TPU_LIBRARY_PATH",  # may point at a CPU plugin: no topology could be described
    "LIBTPU_INIT_ARGS",  # compiler flags that no cache key names
    "XLA_FLAGS",
    "PYTHONWARNINGS",  # the parent's "error" would stop JAX's import
)
_SET_IN_WORKERS = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server off Google's cloud
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # workers run beside each other, and beside a process that owns the chip
    "TPU_MIN_LOG_LEVEL": "3",  # else libtpu writes up to 1 GiB a log file and process
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",  # a crash inside libtpu leaves a Python stack on stderr
}

_SCHEDULES = "TPUKERN_WORKER_SCHEDULES"
_SCHEDULE_FLAGS = (
    "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=packed-bundles-post-ra"
)


def value(name: str) -> str | None:
    """Returns the environment variable ``name``, or None if it is unset or empty."""
    return os.environ.get(name) or None


def leave_the_device_alone() -> None:
    """Keeps ``import torch`` from starting torch_tpu in this process and its children, unless the user asked for it."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def _number(name: str, default: float, minimum: float) -> float:
    text = value(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not minimum <= number < float("inf"):
        raise ConfigError("environment", f"{name}={text!r}", f"a number, {minimum:g} or more", f"Unset {name} or mend it.")
    return number


def cache_folder() -> pathlib.Path:
    """Returns the folder of the compile cache: ``TPUKERN_CACHE_DIR``, or the user's cache folder."""
    text = value("TPUKERN_CACHE_DIR")
    if text is not None:
        return pathlib.Path(text).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("tpukern", appauthor=False)


def records_folder() -> pathlib.Path:
    """Returns the folder of the user's tuned configs: ``TPUKERN_RECORDS_DIR``, or ``records`` in the cache folder."""
    text = value("TPUKERN_RECORDS_DIR")
    return pathlib.Path(text).expanduser() if text is not None else cache_folder() / "records"


def records_used() -> tuple[str, ...]:
    """Returns which tuned configs are looked up: ``TPUKERN_RECORDS``, ``all`` (or unset), ``user``, ``shipped`` or ``off``."""
    kinds = {"all": ("user", "shipped"), "user": ("user",), "shipped": ("shipped",), "off": ()}
    text = value("TPUKERN_RECORDS") or "all"
    if text not in kinds:
        found = f"TPUKERN_RECORDS={text!r}"
        raise ConfigError("environment", found, f"one of {list(kinds)}", "Unset TPUKERN_RECORDS or mend it.")
    return kinds[text]


def compile_memory_bytes() -> int | None:
    """Returns how much memory one compile worker may hold: ``TPUKERN_COMPILE_MEMORY_MIB`` MiB, or None: as much as there is."""
    mebibytes = _number("TPUKERN_COMPILE_MEMORY_MIB", 0, 0)
    return int(mebibytes * 1024 * 1024) or None


def cache_limit_bytes() -> int:
    """Returns how many bytes the compile cache may hold: ``TPUKERN_CACHE_MIB`` MiB, or 256 MiB (about 100,000 results)."""
    return int(_number("TPUKERN_CACHE_MIB", 256, 0) * 1024 * 1024)


def compile_workers() -> int:
    """Returns how many compile processes run at once: ``TPUKERN_COMPILE_WORKERS``, or one for each usable CPU."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(_number("TPUKERN_COMPILE_WORKERS", cpus, 1))


def compile_timeout_s() -> float:
    """Returns how many seconds one compile may take: ``TPUKERN_COMPILE_TIMEOUT``, or 600 (a big attention takes 30)."""
    return _number("TPUKERN_COMPILE_TIMEOUT", 600, 0.001)


def jax_platforms() -> str | None:
    """Returns the platforms the user told JAX to use, or None."""
    return value("JAX_PLATFORMS") or value("JAX_PLATFORM_NAME")


def schedule_folder() -> pathlib.Path | None:
    """Returns the folder that libtpu writes its schedules into, in a worker that is asked for them."""
    text = value(_SCHEDULES)
    return pathlib.Path(text) if text else None


def worker_environment(temp_folder: pathlib.Path, *, schedules: bool = False) -> dict[str, str]:
    """Returns the whole environment of a compile worker.

    Only what tpukern sets steers the compiler there: JAX's, XLA's and libtpu's own variables of the parent are dropped. The
    parent's ``sys.path`` is passed on, so that the worker imports the same packages.

    Args:
        temp_folder: The worker's private temporary folder; libtpu puts its logs and lock file there.
        schedules: Whether libtpu is to write its schedules as text.
    """
    kept = {k: v for k, v in os.environ.items() if k not in _REMOVED_FROM_WORKERS and not k.startswith("JAX_")}
    path = os.pathsep.join(os.path.abspath(entry) for entry in dict.fromkeys(sys.path))
    asked = {}
    if schedules:
        folder = temp_folder / "schedules"
        asked = {_SCHEDULES: str(folder), "LIBTPU_INIT_ARGS": _SCHEDULE_FLAGS.format(folder)}
    return kept | _SET_IN_WORKERS | asked | {"TMPDIR": str(temp_folder), "PYTHONPATH": path}


@contextlib.contextmanager
def changed(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Sets environment variables (None removes one) for the length of a ``with`` block, then restores what was there.

    Not for use from several threads at once: the environment belongs to the process.
    """
    before = {name: os.environ.get(name) for name in variables}
    _assign(variables)
    try:
        yield
    finally:
        _assign(before)


def _assign(variables: Mapping[str, str | None]) -> None:
    for name, text in variables.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text
