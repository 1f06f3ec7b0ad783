"""Which recorded config a call gets: of the user's records or of those that ship, for its sizes or for the nearest ones.

A record fits a call of the same kernel, chip, element types and static arguments (floating-point ones apart). Of the records
that fit, one of the same sizes is taken, the user's before the shipped. Without one it is the nearest: the least sum, over the
dims, of |log2(recorded size / asked size)|, every one of them at most 3 (a factor of 8). Its config must be legal at the asked
sizes and, for want of a compile that says so, within the VMEM estimate; else the next nearest is asked.
"""

import dataclasses
import functools
import hashlib
import math
import pathlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from tpukern import environment, value_names
from tpukern.autotune.recording import SHIPPED, SOURCES, Record, Store
from tpukern.targets import Target

if TYPE_CHECKING:
    from tpukern.dsl.signature import Signature

FARTHEST: Final = 3.0  # log2 of the largest ratio between a recorded size and the asked one
USER: Final = "user"
SHIPS: Final = "shipped"
_LOCK: Final = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recalled:
    """A record that was chosen.

    Attributes:
        record: The record.
        layer: "user" or "shipped".
        distance: How far its sizes are from those asked; 0 if they are the same.
    """

    record: Record
    layer: str
    distance: float

    def __str__(self) -> str:
        if not self.distance:
            return f"{self.layer} record"
        sizes = ",".join(f"{name}={size}" for name, size in self.record.sizes.items())
        return f"{self.layer} record of {sizes}"


def layers() -> tuple[tuple[str, pathlib.Path], ...]:
    """Returns the folders that are looked into, the first before the second."""
    used = environment.records_used()
    places = ((USER, environment.records_folder()), (SHIPS, SHIPPED))
    return tuple((name, folder) for name, folder in places if name in used)


def statics_of(declaration: Any, statics: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the static arguments that tell records apart, as JSON; None if one cannot be named by its content.

    A floating-point number (eps, scale) changes a constant of the code, not its schedule: it is left out.
    """
    found: dict[str, Any] = {}
    for name, value in statics.items():
        if isinstance(value, float) or (value is None and "float" in str(declaration.static_types.get(name, ""))):
            continue
        try:
            found[name] = value if value is None or isinstance(value, bool | int | str) else value_names.stable(value)
        except value_names.Unkeyable:
            return None
    return found


@functools.lru_cache(maxsize=1024)
def _parsed(path: pathlib.Path, stamp: tuple[int, int, int]) -> tuple[Record, ...]:
    return Store(path.parent.parent)._read(path)


def records_of(folder: pathlib.Path, kernel: str, target: str) -> tuple[Record, ...]:
    """Returns the records of a file, which is read again only when it has changed."""
    path = Store(folder).path(kernel, target)
    try:
        status = path.stat()
    except OSError:
        return ()
    with _LOCK:
        return _parsed(path, (status.st_mtime_ns, status.st_size, status.st_ino))


def recall(
    declaration: Any, signature: "Signature", target: Target, legal: Callable[[Mapping[str, Any], bool], bool]
) -> Recalled | None:
    """Returns the record for a call, or None.

    Args:
        declaration: The kernel's.
        signature: The call's.
        target: The chip.
        legal: A config, and whether it was tuned at these very sizes, to whether the kernel can run it there.
    """
    found = [(layer, records_of(folder, signature.kernel, target.name)) for layer, folder in layers()]
    if not any(records for _, records in found):
        return None
    statics = statics_of(declaration, signature.statics)
    inputs = tuple(o.dtype for o in signature.inputs)
    sizes = dict(signature.sizes)
    candidates: list[Recalled] = []
    for layer, records in found:
        for record in records:
            if record.inputs != inputs or dict(record.statics) != statics:
                continue
            distance = _distance(record.sizes, sizes)
            if distance is not None:
                candidates.append(Recalled(record=record, layer=layer, distance=distance))
    for chosen in sorted(candidates, key=_order):
        if legal(chosen.record.config, chosen.distance == 0):
            return chosen
    return None


def _order(found: Recalled) -> tuple[Any, ...]:
    record = found.record
    return found.distance, found.layer != USER, -SOURCES.index(record.source), record.us, record.problem


def _distance(recorded: Mapping[str, int], asked: Mapping[str, int]) -> float | None:
    """Returns how far sizes are apart; None if too far, or of other dims."""
    if recorded.keys() != asked.keys():
        return None
    total = 0.0
    for name, size in asked.items():
        if size == recorded[name]:
            continue
        if size < 1 or recorded[name] < 1:
            return None
        step = abs(math.log2(recorded[name] / size))
        if step > FARTHEST:
            return None
        total += step
    return total


def state(target: Target | None) -> str:
    """Returns a digest of all records for a chip: what the configs of compiled graphs depend on."""
    digest = hashlib.sha256()
    for layer, folder in layers() if target is not None else ():
        assert target is not None
        for path in sorted((folder / target.name).glob("*.json")):
            digest.update(f"{layer} {path.name}\0".encode() + _bytes(path))
    return digest.hexdigest()


def _bytes(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def forget(kernels: Iterable[Any]) -> None:
    """Makes kernels and their gradients ask for their records again: new ones were written."""
    for kernel in kernels:
        for each in kernel.directions.values():
            each.forget_defaults()
