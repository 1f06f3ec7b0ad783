"""What was tried: one line of JSON for each config, appended to a file for each target and kernel.

A search that was interrupted, or is run again, takes what it finds here, failures included; the report draws the landscape from
it. A line is appended in one write, so writers do not tear each other's; one that was cut short (kill -9, a full disk) is left
out when the file is read.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Final

from tpukern import environment
from tpukern.dsl import Config

_MOST_BYTES: Final = 64 << 20  # of a file; then it begins anew: the results are in the compile cache too


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One config, tried.

    Attributes:
        config: The config.
        us: Its time, microseconds; None if it failed.
        source: Where the time comes from.
        failure: What kind of failure it was: "VMEM", "compiler", "time-out", "memory", "crash", "lowering", "numerics".
        reason: The message.
        vmem_bytes: VMEM that it uses, if known.
        samples: The single times of a measurement, microseconds.
        known: Whether it was tried before.
    """

    config: Config
    us: float | None = None
    source: str = ""
    failure: str = ""
    reason: str = ""
    vmem_bytes: int | None = None
    samples: tuple[float, ...] = ()
    known: bool = False

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return {**dataclasses.asdict(self), "config": dict(self.config)}


class Log:
    """The trials of one kernel on one target.

    Args:
        kernel: The kernel's name.
        target: The chip's name.
        folder: Where; None: `tuning` in the cache folder.

    Attributes:
        problem: Why lines cannot be kept, once that has been found out; else None.
    """

    def __init__(self, kernel: str, target: str, folder: pathlib.Path | None = None) -> None:
        folder = environment.cache_folder() / "tuning" if folder is None else folder
        self.path = folder / target / f"{kernel}.jsonl"
        self.problem: str | None = None
        self._known: dict[str, Trial] | None = None

    def get(self, key: str) -> Trial | None:
        """Returns the trial kept under a key: a digest of all that its result depends on."""
        if self._known is None:
            self._known = self._read()
        return self._known.get(key)

    def put(self, key: str, problem: Mapping[str, Any], trial: Trial) -> None:
        """Appends a trial."""
        line = json.dumps({"key": key, "problem": dict(problem), "trial": trial.as_json()}) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and self.path.stat().st_size > _MOST_BYTES:
                os.replace(self.path, self.path.with_suffix(".old.jsonl"))
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            self.problem = f"{self.path} cannot be written: {error.strerror or error}"
        if self._known is not None:
            self._known[key] = trial

    def entries(self) -> list[dict[str, Any]]:
        """Returns all that is in the file, the oldest first: dicts with `key`, `problem` and `trial`."""
        found = []
        try:
            lines = self.path.read_bytes().splitlines()
        except OSError:
            return []
        for line in lines:
            try:
                entry = json.loads(line)
                entry["key"], entry["trial"]["config"], entry["problem"]
            except (ValueError, KeyError, TypeError):
                continue
            found.append(entry)
        return found

    def _read(self) -> dict[str, Trial]:
        fields = {field.name for field in dataclasses.fields(Trial)}
        found = {}
        for entry in self.entries():
            value = {name: item for name, item in entry["trial"].items() if name in fields}
            value |= {"config": Config(value["config"]), "samples": tuple(value.get("samples", ())), "known": True}
            found[entry["key"]] = Trial(**value)
        return found
