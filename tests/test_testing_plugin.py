"""The pytest plugin, run on the example project and on broken copies of it."""

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tpukern.errors import ConfigError
from tpukern.testing import verdict_tests
from tpukern.testing.items import kernels_of, questions

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
    done = run_pytest(project, "--tpukern", *FAST, "-n", "2", "--dist", "loadgroup", "--junit-xml", "report.xml")
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


BAD = [
    (("--tpukern-kernel", "softmx"), "no kernel 'softmx'; expected one of ['hardsigmoid', 'softmax']. Did you mean 'softmax'"),
    (("-o", "tpukern_modules=absent.py"), "absent.py does not import: FileNotFoundError: no file absent.py"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_bad_input(project: Path, words: tuple[str, ...], message: str) -> None:
    shutil.rmtree(project / "tests")
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
