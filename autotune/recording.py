"""Records of tuned configs on disk: one JSON file for each target and kernel.

A file is changed under a lock, written beside its place, synced, and renamed into it: a reader sees the old records or the new
ones, after kill -9 and on a full disk too, and two writers both keep what they found. A file that does not read is set aside
under another name, with a warning, before a new one takes its place.

The lock is filelock's (which torch requires anyway): an advisory lock of the operating system, gone with the process that holds
it, so that nothing has to be cleared after kill -9.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from tpukern import environment
from tpukern.errors import RecordError

FORMAT: Final = 1
SOURCES: Final = ("roofline", "profile", "replay", "measured")  # where a time comes from, the best last
SHIPPED: Final = pathlib.Path(__file__).parent / "records"
_LOCK_S: Final = 60.0
_NAME: Final = re.compile(r"[A-Za-z_][\w.-]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The best config known of one kernel, at one signature, on one chip.

    Attributes:
        kernel: The kernel's name; a gradient has its own.
        target: The chip.
        inputs: Element type of each input.
        statics: Static arguments that the code depends on; floating-point ones are left out, they only change constants.
        sizes: Size of every dim.
        config: The config.
        us: Its time, microseconds.
        source: Where the time comes from: one of `SOURCES`.
        samples: The single times, microseconds; one if the source is a prediction.
        default_us: Time of the default config, from the same source; None if it failed.
        default_config: The default config, as text.
        workload: Name of the workload that the sizes are of, or None.
        tried: How many configs were tried.
        failed: How many of them failed.
        space: How many configs the kernel has there.
        verified: How its results were checked.
        date: When, UTC.
        versions: Of tpukern, jax, jaxlib, libtpu.
        digest: `Kernel.source_digest()` when it was tuned.
        code: `Lowered.digest` of the program that was timed: the same digest is the same program.
    """

    kernel: str
    target: str
    inputs: tuple[str, ...]
    statics: Mapping[str, Any]
    sizes: Mapping[str, int]
    config: Mapping[str, Any]
    us: float
    source: str
    samples: tuple[float, ...] = ()
    default_us: float | None = None
    default_config: str = ""
    workload: str | None = None
    tried: int = 0
    failed: int = 0
    space: int = 0
    verified: str = ""
    date: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    digest: str = ""
    code: str = ""

    @property
    def problem(self) -> str:
        """What is tuned, as text: two records of one problem compete."""
        parts = (self.kernel, self.target, list(self.inputs), dict(self.statics), dict(self.sizes))
        return json.dumps(parts, sort_keys=True)

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> "Record":
        """Reads what `as_json` gave; fields that it does not know are left out.

        Raises:
            ValueError: A field is missing or of another type.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        try:
            fields = {name: value[name] for name in known if name in value}
            fields |= {name: tuple(fields[name]) for name in ("inputs", "samples") if name in fields}
            record = cls(**fields)
            mappings = (record.statics, record.sizes, record.config, record.versions)
            good = all(isinstance(m, dict) for m in mappings) and isinstance(record.us, int | float)
            good = good and bool(_NAME.fullmatch(record.kernel)) and bool(_NAME.fullmatch(record.target))
            good = good and record.source in SOURCES and record.us > 0
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(str(error)) from error
        if not good:
            raise ValueError(f"no record: {json.dumps(value)[:200]}")
        return record


def better(new: Record, old: Record) -> bool:
    """Whether `new` takes the place of `old`, a record of the same problem.

    The better source wins; of one source and program version the shorter time, of different ones the newer.
    """
    ranks = SOURCES.index(new.source), SOURCES.index(old.source)
    if ranks[0] != ranks[1]:
        return ranks[0] > ranks[1]
    if (new.versions, new.digest) == (old.versions, old.digest):
        return (new.us, old.date) < (old.us, new.date)
    return new.date > old.date


def merged(*groups: Iterable[Record]) -> tuple[Record, ...]:
    """Returns the best record of every problem, in a fixed order; see `better`."""
    found: dict[str, Record] = {}
    for record in (record for group in groups for record in group):
        old = found.get(record.problem)
        if old is None or better(record, old):
            found[record.problem] = record
    return tuple(found[key] for key in sorted(found))


def now() -> str:
    """The time, as records carry it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def text_of(kernel: str, target: str, records: Sequence[Record]) -> str:
    """Returns the text of a file of records."""
    body = [record.as_json() for record in records]
    value = {"format": FORMAT, "kernel": kernel, "target": target, "sha256": _checksum(body), "records": body}
    return json.dumps(value, indent=1) + "\n"


def _checksum(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def parse(text: str | bytes) -> tuple[Record, ...]:
    """Reads what `text_of` gave.

    Raises:
        ValueError: It is something else, or was cut short or changed.
    """
    try:
        value = json.loads(text)
        body, wanted, version = value["records"], value["sha256"], value["format"]
    except (KeyError, TypeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError("it is no file of records") from error
    if version != FORMAT:
        raise ValueError(f"it has format {version!r}; this tpukern reads {FORMAT}")
    if wanted != _checksum(body):
        raise ValueError("its checksum does not fit: it was cut short, or changed by hand")
    return tuple(Record.of_json(each) for each in body)


class Store:
    """A folder of records.

    Args:
        folder: Where; made when first written to. None: `environment.records_folder()`.
    """

    def __init__(self, folder: pathlib.Path | None = None) -> None:
        self.folder = environment.records_folder() if folder is None else folder

    def path(self, kernel: str, target: str) -> pathlib.Path:
        """Returns the file of one kernel and target."""
        return self.folder / target / f"{kernel}.json"

    def files(self) -> list[pathlib.Path]:
        """Returns the files that are there, sorted."""
        return sorted(path for path in self.folder.glob("*/*.json") if not path.name.startswith("."))

    def read(self, kernel: str, target: str) -> tuple[Record, ...]:
        """Returns the records of a kernel and target; none, with a warning, if the file does not read."""
        return self._read(self.path(kernel, target))

    def all(self) -> tuple[Record, ...]:
        """Returns all records of the folder; files that do not read are warned of and left out."""
        return tuple(record for path in self.files() for record in self._read(path))

    def _read(self, path: pathlib.Path) -> tuple[Record, ...]:
        try:
            return parse(path.read_bytes())
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as error:
            _warn(f"{path} cannot be read ({_reason(error)}) and is left out", "Run tpukern tune again, or restore it.")
            return ()

    def add(self, records: Iterable[Record]) -> tuple[pathlib.Path, ...]:
        """Merges records into the files that they belong to, and returns those files.

        Raises:
            RecordError: A file cannot be written, or another process holds its lock; what was recorded before is untouched.
        """
        groups: dict[tuple[str, str], list[Record]] = {}
        for record in records:
            groups.setdefault((record.kernel, record.target), []).append(record)
        return tuple(self._add(kernel, target, group) for (kernel, target), group in groups.items())

    def _add(self, kernel: str, target: str, new: Sequence[Record]) -> pathlib.Path:
        path = self.path(kernel, target)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked(path):
                write(path, text_of(kernel, target, merged(self._kept(path), new)))
        except OSError as error:
            raise RecordError(
                kernel,
                f"{path} cannot be written: {_reason(error)}",
                "a folder with space that can be written",
                "What was recorded before is untouched. Mend it, or set TPUKERN_RECORDS_DIR, and run again: no result is lost.",
                target=target,
            ) from error
        return path

    @contextlib.contextmanager
    def _locked(self, path: pathlib.Path) -> Iterator[None]:
        import filelock

        place = path.with_name(f".{path.name}.lock")
        try:
            with filelock.FileLock(place, timeout=_LOCK_S):
                yield
        except filelock.Timeout as error:
            raise OSError(f"another process has held {place} for {_LOCK_S:g} s") from error

    def _kept(self, path: pathlib.Path) -> tuple[Record, ...]:
        """Returns the records of a file that is to be replaced; one that does not read is renamed first."""
        try:
            return parse(path.read_bytes())
        except FileNotFoundError:
            return ()
        except ValueError as error:
            aside = path.with_name(f"{path.name}.corrupt-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}")
            os.rename(path, aside)
            _warn(f"{path} cannot be read ({_reason(error)}); it is kept as {aside.name}, and a new one begun")
            return ()


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file as a whole or not at all.

    Raises:
        OSError: It cannot be written; what was there is untouched.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).rstrip(".")


def _warn(what: str, do: str = "") -> None:
    warnings.warn(f"tpukern[records]: {what}.{' ' + do if do else ''}", RuntimeWarning, stacklevel=4)
