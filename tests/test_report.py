"""``tpukern report`` and ``tpukern trace``: what is on the page, that it loads nothing, and what is said without it."""

import builtins
import html.parser
import json
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import tpukern
from tpukern.autotune import drawing, recording, reporting, trials
from tpukern.autotune.estimating import Estimate, of_workload
from tpukern.autotune.reporting import Entry
from tpukern.autotune.timeline import Event, Operation, Timeline
from tpukern.dsl import Config
from tpukern.errors import CompileError, ConfigError
from tpukern.kernels import matmul

pytest.importorskip("matplotlib")
SCRIPT = str(Path(sysconfig.get_path("scripts")) / "tpukern")
WORKLOAD = matmul.workloads[0]
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(html.parser.HTMLParser):
    """What a page holds; fails where a tag is left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.images: list[str] = []
        self.metas: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [v for k, v in attrs if k in ("href", "src", "xlink:href") and v and not v.startswith("#")]
        if tag == "figure":
            self.images.append(values["aria-label"] or "")
        if tag == "meta":
            self.metas.append(values.get("name") or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


def predicted(**changes: Any) -> Estimate:
    fields: dict[str, Any] = {
        "kernel": "matmul", "direction": "forward", "workload": WORKLOAD.name, "target": "v5e", "config": "",
        "source": "replay", "us": 1234.5, "cycles": 1, "compute_us": 1000.0, "hbm_us": 400.0, "wait_us": 10.0,
        "bound_by": "compute", "flops": 10**11, "mxu_share": 0.4, "hbm_bytes": 10**8, "hbm_share": 0.1,
        "vmem_bytes": 12 << 20, "vmem_limit_bytes": 16 << 20,
        "gaps": ("something is not in it",), "versions": {"libtpu": "0.0.51"},
    }  # fmt: skip
    return Estimate(**fields | changes)


def entry(target: str = "v5e", **changes: Any) -> Entry:
    chip = tpukern.target(target)
    bound = of_workload(matmul, WORKLOAD.name, "forward", {}, chip)
    fields: dict[str, Any] = {
        "kernel": "matmul", "direction": "forward", "workload": WORKLOAD.name, "dtype": WORKLOAD.dtype, "target": chip,
        "bound": bound, "found": predicted(target=target),
    }  # fmt: skip
    return Entry(**fields | changes)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TPUKERN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TPUKERN_RECORDS", "user")
    return tmp_path


def test_a_page_says_all_and_loads_nothing(folder: Path) -> None:
    events = tuple(Event(lane=lane, begin_us=i, end_us=1200.0) for i, lane in enumerate(("compute", "wait", "HBM read")))
    line = Timeline(
        kernel="matmul", target="v5e", operations=(Operation(name="matmul.1", begin_us=0, end_us=1234.5, events=events),)
    )
    refused = CompileError("matmul", "no room", target="v6e")
    page = Page(text := reporting.page([entry(line=line), entry("v6e", found=refused)]))
    assert page.links == []
    assert not re.search(r"@import|url\((?!#)|<script", text)
    assert "viewport" in page.metas
    assert "1,234.5" in page.words
    assert [w for w in page.words if w.endswith(str(refused))] == [str(refused), f"v6e: {refused}"]
    assert "Nothing here has been tuned;" in page.words
    assert [w.split("(")[0].strip() for w in page.words if w.startswith("something is not in it")] == ["something is not in it"]
    about = f"{WORKLOAD.name} forward"
    assert page.images == [
        "Roofline of matmul", "Shares of peak of matmul", f"VMEM map of matmul {about}", f"One grid step of matmul {about}",
    ]  # fmt: skip


def test_what_was_tuned_is_shown(folder: Path) -> None:
    point = entry()
    signature = point.bound.signature
    inputs, sizes = tuple(o.dtype for o in signature.inputs), dict(signature.sizes)
    best, worst = Config({"block_m": 512, "block_n": 512}), Config({"block_m": 128, "block_n": 128})
    record = recording.Record(
        kernel="matmul", target="v5e", inputs=inputs, statics={}, sizes=sizes, config=dict(best), us=100.0, source="replay",
        default_us=150.0, tried=3, failed=1, space=40, date=recording.now(),
    )  # fmt: skip
    recording.Store().add([record])
    log = trials.Log("matmul", "v5e")
    problem = {"sizes": sizes, "inputs": list(inputs)}
    for number, trial in enumerate((
        trials.Trial(config=best, us=100.0, source="replay"),
        trials.Trial(config=worst, us=200.0, source="replay"),
        trials.Trial(config=Config({"block_m": 9}), failure="VMEM", reason="too large"),
    )):  # fmt: skip
        log.put(str(number), problem, trial)
    page = Page(reporting.page([point]))
    assert "1.50" in page.words
    assert f"Tuning landscape of matmul {WORKLOAD.name} forward" in page.images
    assert any(w.endswith("v5e: 1 failed (VMEM).") for w in page.words)


def test_without_the_plots_library(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name == "matplotlib":
            raise ImportError(name)
        return real(name, *rest, **more)

    drawing.matplotlib.cache_clear()
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError) as error:
        drawing.matplotlib()
    monkeypatch.undo()
    assert str(error.value) == (
        "report[config]: Matplotlib is not installed; expected the plots' library. pip install 'tpukern[report]'"
    )


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *words], cwd=folder, capture_output=True, text=True, timeout=300)


def test_the_commands(tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    small = ("--shape", "r=256,d=512,eps=1e-5", "--dtype", "f32", "--direction", "forward")
    done = command(tmp_path, "report", "rms_norm", "--target", "v5e", *small, "-o", "page.html")
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("page.html: 1 points. Predicted, not measured.\n")
    page = Page((tmp_path / "page.html").read_text())
    assert "One grid step of rms_norm r=256,d=512,eps=1e-5 forward" in page.images
    done = command(tmp_path, "trace", "rms_norm", "--target", "v5e", *small, "-o", "trace.json")
    assert (done.returncode, done.stderr.count("Predicted, not measured.")) == (0, 1)
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["kernel"] == "rms_norm"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("trace", "rms_norm", "--target", "all"), "error: tpukern trace: --target takes one chip. See 'tpukern trace"),
        (("report", "nothing"), "error: kernel[config]: no kernel 'nothing'; expected one of ["),
    ],
)
def test_what_cannot_be_asked(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = command(tmp_path, *words)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith(message)
