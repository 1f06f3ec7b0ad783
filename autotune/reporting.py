"""`tpukern report`: one page about kernels, workloads and chips, with nothing to load from elsewhere.

Every time in it is one of `estimating`, with its source; the figures are `drawing`'s, the page a Jinja template. What was tuned
(`recording`, `trials`) is shown where there is any.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from tpukern.autotune import chips, drawing, estimating, recalling, timeline, trials
from tpukern.autotune.estimating import REPLAY, Estimate
from tpukern.autotune.recording import Record
from tpukern.autotune.timeline import Timeline
from tpukern.compiling import Job
from tpukern.errors import ConfigError, TpukernError
from tpukern.targets import Target
from tpukern.version import __version__

_TEMPLATE: Final = "report.html.jinja"


@dataclasses.dataclass(kw_only=True)
class Entry:
    """One point of a report.

    Attributes:
        kernel: The forward kernel's name.
        direction: "forward" or "backward".
        workload: The workload's name.
        dtype: Its element type.
        target: The chip.
        bound: The kernel at its shapes and config; None if it could not be bound.
        found: Its estimate, or why there is none.
        line: What happens when, if the estimate is a replay.
    """

    kernel: str
    direction: str
    workload: str
    dtype: str
    target: Target
    bound: Any
    found: Estimate | TpukernError | None = None
    line: Timeline | None = None

    @property
    def estimate(self) -> Estimate | None:
        return self.found if isinstance(self.found, Estimate) else None

    def record(self) -> Record | None:
        """Returns the record of this very problem, if it was tuned."""
        if self.bound is None:
            return None
        signature = self.bound.signature
        inputs, sizes = [o.dtype for o in signature.inputs], dict(signature.sizes)
        for _, folder in recalling.layers():
            for record in recalling.records_of(folder, self.bound.kernel.name, self.target.name):
                if (list(record.inputs), dict(record.sizes)) == (inputs, sizes):
                    return record
        return None

    def tried(self) -> list[dict[str, Any]]:
        """Returns the trials of this problem, the last one of each config, as the log has them."""
        if self.bound is None:
            return []
        sizes = dict(self.bound.signature.sizes)
        inputs = [o.dtype for o in self.bound.signature.inputs]
        found: dict[str, dict[str, Any]] = {}
        for entry in trials.Log(self.bound.kernel.name, self.target.name).entries():
            problem = entry["problem"]
            if problem.get("sizes") == sizes and list(problem.get("inputs", inputs)) == inputs:
                found[json.dumps(entry["trial"]["config"], sort_keys=True)] = entry["trial"]
        return list(found.values())


def collect(entries: Sequence[Entry], on_result: Callable[[Entry], None] | None = None) -> None:
    """Estimates the entries, and records the timelines of those that were replayed.

    Args:
        entries: They are filled in.
        on_result: Called with each entry, twice if it gets a timeline.

    Raises:
        CompileError: libtpu is not installed.
    """

    def note(entry: Entry) -> None:
        if on_result is not None:
            on_result(entry)

    jobs = {
        i: Job(bound=e.bound, target=e.target, direction=e.direction, workload=e.workload)
        for i, e in enumerate(entries)
        if e.bound is not None
    }
    places = list(jobs)

    def estimated(index: int, found: Estimate | TpukernError) -> None:
        entry = entries[places[index]]
        entry.found = found
        note(entry)

    estimating.estimate_many([jobs[i] for i in places], on_result=estimated)
    replayed = [i for i in places if (e := entries[i].estimate) is not None and e.source == REPLAY]
    lines = timeline.timelines([jobs[i] for i in replayed], on_result=lambda index: note(entries[replayed[index]]))
    for i, line in zip(replayed, lines, strict=True):
        entries[i].line = line if isinstance(line, Timeline) else None


def page(entries: Sequence[Entry]) -> str:
    """Returns the report as one HTML document.

    Raises:
        ConfigError: Jinja or Matplotlib is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        do = "pip install 'tpukern[report]'"
        raise ConfigError("report", "Jinja is not installed", "the page's template engine", do) from error
    drawing.matplotlib()
    source = (pathlib.Path(__file__).parent / _TEMPLATE).read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    kernels: dict[str, list[Entry]] = {}
    for entry in entries:
        kernels.setdefault(entry.kernel, []).append(entry)
    versions = next((e.estimate.versions for e in entries if e.estimate is not None), {})
    return environment.from_string(source).render(
        date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        versions={"tpukern": __version__, **versions},
        rows=[_row(e) for e in entries],
        tuned=[row for e in entries if (row := _tuned(e)) is not None],
        kernels=[_section(name, group) for name, group in kernels.items()],
        gaps=_gaps(entries),
    )


def _row(entry: Entry) -> dict[str, Any]:
    shown = {"kernel": entry.kernel, "direction": entry.direction, "workload": entry.workload, "dtype": entry.dtype}
    row = {**shown, "target": entry.target.name, "error": None, "estimate": entry.estimate}
    return row if entry.estimate is not None else row | {"error": str(entry.found or "it cannot be bound")}


def _tuned(entry: Entry) -> dict[str, Any] | None:
    record = entry.record()
    if record is None:
        return None
    gain = record.default_us / record.us if record.default_us else None
    name = f"{entry.kernel} {entry.direction}"
    return {"name": name, "workload": entry.workload, "target": entry.target.name, "record": record, "gain": gain}


def _gaps(entries: Iterable[Entry]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entry in entries:
        for gap in entry.estimate.gaps if entry.estimate is not None else ():
            found.setdefault(gap, []).append(f"{entry.kernel} {entry.direction} {entry.workload} {entry.target.name}")
    return found


def _section(name: str, entries: Sequence[Entry]) -> dict[str, Any]:
    good = [e for e in entries if e.estimate is not None]
    labels = {id(e): f"{e.workload} {e.direction}" for e in good}
    targets = {e.target.name: chips.chip(e.target) for e in good}
    marks: dict[str, list[drawing.Mark]] = {}
    for entry in good:
        found = entry.estimate
        assert found is not None
        if found.flops and found.hbm_bytes:
            mark = drawing.Mark(
                label=labels[id(entry)], intensity=found.flops / found.hbm_bytes, flops_per_s=found.flops / (found.us * 1e-6)
            )
            marks.setdefault(entry.target.name, []).append(mark)
    rows = [(f"{labels[id(e)]} {e.target.name}", e.estimate.mxu_share, e.estimate.hbm_share) for e in good if e.estimate]
    points: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        points.setdefault((entry.workload, entry.direction), []).append(entry)
    return {
        "name": name,
        "roofline": drawing.roofline(targets, marks, f"{name} roofline") if marks else None,
        "shares": drawing.shares(rows, f"{name} shares") if rows else None,
        "points": [_point(name, *key, group) for key, group in points.items()],
    }


def _point(name: str, workload: str, direction: str, entries: Sequence[Entry]) -> dict[str, Any]:
    unique = f"{name} {workload} {direction}"
    usages = [(e.target.name, _usage(e), e.estimate.vmem_limit_bytes) for e in entries if e.estimate is not None]
    steps = {e.target.name: found for e in entries if (found := _step(e))}
    tried = {e.target.name: e.tried() for e in entries}
    times = {target: [t["us"] for t in group if t["us"] is not None] for target, group in tried.items()}
    times = {target: group for target, group in times.items() if group}
    records = {e.target.name: record for e in entries if (record := e.record()) is not None}
    default = {target: record.default_us for target, record in records.items() if record.default_us and target in times}
    return {
        "title": f"{workload} {direction}",
        "configs": [(e.target.name, str(e.bound.config)) for e in entries if e.bound is not None],
        "vmem": drawing.vmem(usages, f"{unique} vmem") if any(parts for _, parts, _ in usages) else None,
        "lanes": drawing.lanes(steps, f"{unique} lanes") if steps else None,
        "landscape": drawing.landscape(times, default, f"{unique} landscape") if times else None,
        "failures": _failures(tried),
        "errors": [(e.target.name, str(e.found)) for e in entries if isinstance(e.found, TpukernError)],
    }


def _usage(entry: Entry) -> list[tuple[str, int]]:
    """Returns what takes VMEM in the kernel that takes the most: its blocks, its scratch, and what the compiler adds."""
    call = max(entry.bound.calls, key=lambda c: c.vmem_estimate_bytes, default=None)
    if call is None:
        return []
    parts = [(use.name, use.vmem_bytes) for use in call.blocks if use.vmem_bytes]
    scratch = sum(buffer.vmem_bytes for buffer in call.scratch)
    parts += [("scratch", scratch)] if scratch else []
    total = entry.estimate.vmem_bytes if entry.estimate is not None else None
    rest = (total or 0) - sum(size for _, size in parts)
    return parts + ([("the compiler's own", rest)] if rest > 0 else [])


def _step(entry: Entry) -> tuple[timeline.Event, ...]:
    if entry.line is None:
        return ()
    name = entry.line.longest.name
    steps = next((c.steps for c in entry.bound.calls if name == c.name or name.rpartition(".")[0] == c.name), None)
    return entry.line.step(steps or 1)


def _failures(tried: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[tuple[str, str, int]]:
    counted: dict[tuple[str, str], int] = {}
    for target, group in tried.items():
        for trial in group:
            if trial.get("failure"):
                key = (target, str(trial["failure"]))
                counted[key] = counted.get(key, 0) + 1
    return [(target, why, number) for (target, why), number in counted.items()]
