"""The pytest plugin, run on the example project and on broken copies of it."""

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tpukern import kernels
from tpukern.dsl import Kernel
from tpukern.errors import ConfigError
from tpukern.testing import PROPERTIES, items, verdict_tests
from tpukern.testing.findings import Finding, Result, Verdict
from tpukern.testing.items import Settings, kernels_of, questions

EXAMPLE = Path(__file__).parent.parent / "examples" / "soft_kernels"
FAST = ("--tpukern-examples", "3")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the example project."""
    return Path(shutil.copytree(EXAMPLE, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__", ".*")))


def run_pytest(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONWARNINGS"] = "ignore"
    plugin = ("-p", "tpukern.testing.plugin") if "tpukern.testing.plugin" not in _entry_points() else ()
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, *words],
        cwd=project, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def _entry_points() -> list[str]:
    from importlib.metadata import entry_points

    return [point.value for point in entry_points(group="pytest11")]


def test_the_project_passes_on_two_workers_and_names_every_property(project: Path) -> None:
    done = run_pytest(project, "--tpukern", *FAST, "-n", "2", "--junit-xml", "report.xml")
    assert done.returncode == 0, done.stdout + done.stderr
    names = {case.get("name") for case in ElementTree.parse(project / "report.xml").iter("testcase")}
    found = {re.sub(r"@.*$", "", name or "") for name in names}
    assert {"test_rows_sum_to_one", "test_softmax[softmax-forward-parity]", "test_softmax[softmax-backward-semantics]"} <= found
    assert {"hardsigmoid-forward-parity", "hardsigmoid-forward-written_everywhere"} <= found
    assert not any(name.startswith("softmax-") for name in found)  # its own test file has it
    assert not any("compiles" in name for name in found)  # no chip was named


def test_a_broken_kernel_fails_with_what_was_found(project: Path) -> None:
    source = project / "soft_kernels.py"
    source.write_text(source.read_text().replace("+ 3, 0, 6)", "+ 3, 0, 5)"))
    done = run_pytest(project, "--tpukern", *FAST, "--tpukern-kernel", "hardsigmoid")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "parity (forward): y is off by " in done.stdout
    assert "from soft_kernels import hardsigmoid as kernel" in done.stdout
    assert "FAILED tpukern::hardsigmoid-forward-parity" in done.stdout
    assert "deselected" in done.stdout
    assert (project / ".tpukern" / "regressions" / "hardsigmoid.json").is_file()


def test_items_are_chosen_by_name_and_a_chip_adds_the_compiler(project: Path) -> None:
    chosen = ("-k", "compiles or hardsigmoid and not parity", "-m", "tpukern_property")
    done = run_pytest(project, "--collect-only", "--tpukern", "--tpukern-target", "v5e", *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.strip() for line in lines if "::softmax" in line or "softmax-" in line] == [
        "<Function test_softmax[softmax-forward-compiles]>",
        "<Function test_softmax[softmax-backward-compiles]>",
    ]
    asked = [name for name, directions in PROPERTIES.items() if "forward" in directions and name != "parity"]
    found = [line.strip() for line in lines if "hardsigmoid" in line]
    assert found == [f"<Question hardsigmoid-forward-{name}>" for name in asked]
    assert "10/28 tests collected (18 deselected)" in done.stdout


def asked_of(findings: tuple[Finding, ...], settings: Settings, times: list[str]) -> None:
    """Asks for the parity of a kernel whose verdict has these findings, noting each verdict in `times`."""
    kernel = kernels.rms_norm
    results = tuple(Result(property="parity", direction=direction, cases=1) for direction in ("forward", "backward"))
    results += tuple(Result(property=f.property, direction=f.direction, cases=0, findings=(f,)) for f in findings)

    def verdict(kernel: Kernel, settings: Settings) -> Verdict:
        times.append(kernel.name)
        return Verdict(kernel=kernel.name, results=results, worst=(), examples=1, seed=0, seconds=0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items, "_verdict", verdict)
        items.ask(kernel, "backward", "parity", settings)
        items.ask(kernel, "forward", "parity", settings)


def test_a_finding_that_no_test_asks_for_fails_the_first() -> None:
    found = Finding(property="deterministic", direction="forward", what="it flickers", script="print(1)")
    with pytest.raises(pytest.fail.Exception) as caught:
        asked_of((found,), Settings(properties=("parity",)), [])
    assert str(caught.value) == "deterministic (forward): it flickers.\n\nReproduce it:\n\nprint(1)"


def test_processes_share_a_verdict(tmp_path: Path) -> None:
    times: list[str] = []
    for _ in range(2):
        items._answers.cache_clear()
        asked_of((), Settings(properties=("parity",), shared=tmp_path), times)
    assert times == ["rms_norm"]
    asked_of((), Settings(properties=("parity",), shared=tmp_path, seed=1), times)
    assert times == ["rms_norm"] * 2


BAD = [
    (("--tpukern-kernel", "softmx"), "no kernel 'softmx'; expected one of ['hardsigmoid', 'softmax']. Did you mean 'softmax'"),
    (("-o", "tpukern_modules=absent.py"), "absent.py does not import: FileNotFoundError: no file absent.py"),
    (
        ("--tpukern-target", "v5"),
        "target[config]: no target 'v5'; expected one of ['v4', 'v5e', 'v5p', 'v6e', 'v7x']. Did you mean 'v5p'.",
    ),
    (
        ("-p", "no:hypothesispytest", "-p", "forget_hypothesis"),
        "hypothesis is not installed. Run: pip install 'tpukern[verify]'.",
    ),
]
FORGET = """
import sys

for name in [name for name in sys.modules if name.partition(".")[0] == "hypothesis"]:
    del sys.modules[name]
sys.modules["hypothesis"] = None
"""


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_input(project: Path, words: tuple[str, ...], message: str) -> None:
    shutil.rmtree(project / "tests")
    (project / "forget_hypothesis.py").write_text(FORGET)
    done = run_pytest(project, "--tpukern", *words)
    assert done.returncode == 4
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_the_plugin_is_light() -> None:
    code = "import sys, tpukern.testing.plugin; print([m for m in ('jax', 'torch', 'numpy', 'hypothesis') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_which_questions_and_kernels_there_are(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    kernels = kernels_of(["soft_kernels.py"], project)
    assert [k.name for k in kernels] == ["hardsigmoid", "softmax"]
    hardsigmoid, softmax = kernels
    assert ("backward", "parity") not in list(questions(hardsigmoid, None, False))
    assert ("backward", "finite_difference") in list(questions(softmax, None, False))
    assert list(questions(softmax, ["compiles"], False)) == []
    assert list(questions(softmax, ["compiles"], True)) == [("forward", "compiles"), ("backward", "compiles")]
    with pytest.raises(ConfigError, match="absent does not import: ModuleNotFoundError"):
        kernels_of(["absent"], project)
    with pytest.raises(ConfigError, match="no property 'sematics'"):
        verdict_tests(softmax, properties=["sematics"])
