"""What ran: for the calls made so far, which kernel served which op, and why another one did not."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tpukern.registry import REGISTRY

if TYPE_CHECKING:
    from tpukern.overriding import Active

_HEADS = ("op", "kernel", "direction", "calls", "device", "config", "origin", "reason")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Calls of one kind.

    Attributes:
        op: The op that was called.
        kernel: The kernel that ran; empty where ATen's own did.
        direction: "forward" or "backward".
        calls: How many. A graph made by torch.compile counts once, when it is compiled.
        device: "tpu", "emulated" or "cpu".
        config: The kernel's config.
        reason: Why it was not the kernel that ran.
        origin: On a chip, where the config comes from: "given", "user record", "shipped record", "default"; a record of other
            sizes is followed by those.
    """

    op: str
    kernel: str
    direction: str
    calls: int
    device: str
    config: str
    reason: str
    origin: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """Rows in the order of op and kernel.

    Attributes:
        rows: The calls.
        left_out: Overrides that are not installed, and why.
    """

    rows: tuple[Row, ...]
    left_out: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [_HEADS, *(tuple(str(getattr(row, name)) for name in _HEADS) for row in self.rows)]
        widths = [max(len(line[at]) for line in lines) for at in range(len(_HEADS))]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
        if not self.rows:
            text = ["No op with a kernel was called."]
        text += [f"{op}: {reason}" for op, reason in self.left_out]
        return "\n".join(text)


def explain() -> Explanation:
    """Says which kernel ran for the calls made so far, or why none did."""
    rows = sorted(_rows(), key=lambda row: (row.op, row.kernel == "", row.kernel, -row.calls))
    return Explanation(rows=tuple(rows), left_out=tuple(sorted(REGISTRY.left_out.items())))


def reset() -> None:
    """Sets all counts to zero."""
    for launcher in REGISTRY.launchers.values():
        launcher.reset()
    for active in _installed():
        active.calls = 0
        active.reasons.clear()


def _installed() -> Iterator["Active"]:
    yield from REGISTRY.active.values()
    yield from REGISTRY.guards.values()


def _rows() -> Iterator[Row]:
    served = set()
    for launcher in REGISTRY.launchers.values():
        kernel = launcher.kernel
        direction = "backward" if kernel.forward is not None else "forward"
        for (op, device, config, origin, reason), calls in launcher.counts().items():
            served.add(op)
            known = {"op": op, "kernel": kernel.name, "direction": direction, "device": device}
            yield Row(**known, calls=calls, config=config, origin=origin, reason=reason)
    device = REGISTRY.device or ""
    totals: dict[tuple[str, str, str], int] = {}
    for active in _installed():
        if active.calls and active.op not in served:  # it called another op, or only some views
            totals[active.op, active.kernel.name, ""] = totals.get((active.op, active.kernel.name, ""), 0) + active.calls
        for reason, calls in active.reasons.items():
            totals[active.op, "", reason] = totals.get((active.op, "", reason), 0) + calls
    for (op, name, reason), calls in totals.items():
        yield Row(op=op, kernel=name, direction=_direction(op), calls=calls, device=device, config="", reason=reason)


def _direction(op: str) -> Any:
    return "backward" if "_backward" in op else "forward"
