"""``tpukern doctor``: what it says of whole and of broken installations."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tpukern import device
from tpukern.cli import cli
from tpukern.cli import doctor as doctor_module
from tpukern.cli.requirements import Requirement, requirements, satisfies


@pytest.mark.parametrize(
    ("version", "rule", "verdict"),
    [
        ("2.13.0+cpu", ">=2.13,<2.16", True),
        ("2.16.0", ">=2.13,<2.16", False),
        ("2.16", ">=2.13,<2.16.0", False),
        ("2.9.1", ">=2.13,<2.16", False),
        ("0.10.2", ">=0.10.2,<0.13", True),
        ("0.10.1", ">=0.10.2,<0.13", False),
        ("0.0.51", "==0.0.51", True),
        ("0.0.510", "==0.0.51", False),
        ("1.2", "==1.2.0", True),
        ("1.2.dev3", ">=1.2", True),
        ("1.0", "!=1.0", False),
        ("1.0", "", True),
    ],
)
def test_version_rules(version: str, rule: str, verdict: bool) -> None:
    assert satisfies(version, rule) is verdict


def test_requirements_are_those_of_pyproject() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    declared = {("", line.replace(" ", "")) for line in project["dependencies"]}
    declared |= {(extra, line) for extra, lines in project["optional-dependencies"].items() for line in lines}
    found = {(r.extra, r.name, frozenset(r.rule.split(","))) for r in requirements()}
    split = {(extra, *_name_and_rule(line)) for extra, line in declared}
    assert found == split


def _name_and_rule(line: str) -> tuple[str, frozenset[str]]:
    at = next(i for i, c in enumerate(line) if c in "<>=")
    return line[:at], frozenset(line[at:].split(","))


def an_installation(**versions: str | None) -> list[Requirement]:
    wanted = [
        ("torch", ">=2.13,<2.16", "", "2.13.0+cpu"),
        ("jax", ">=0.10.2,<0.13", "", "0.10.2"),
        ("libtpu", "==0.0.51", "compile", "0.0.51"),
        ("torch_tpu", "==0.2.0", "tpu", "0.2.0"),
        ("torch_tpu", "==0.2.0", "emulator", "0.2.0"),
        ("plugin", "==0.11.2", "emulator", "0.11.2"),
        ("helion", "==1.5.1", "helion", "1.5.1"),
        ("pytest", ">=8", "test", "9.0"),
    ]
    return [Requirement(name=n, rule=r, extra=e, installed=versions.get(n, v)) for n, r, e, v in wanted]


def missing(what: str, purpose: str, mend: str, *, required: bool = True) -> dict[str, Any]:
    return {"what": what, "purpose": purpose, "mend": mend, "required": required}


EMULATOR = "the tpu device on a machine without a TPU"
CASES: dict[str, tuple[dict[str, str | None], str, list[dict[str, Any]]]] = {
    "whole": ({}, "emulated", []),
    "no torch": (
        {"torch": None},
        "emulated",
        [
            missing(
                "torch is not installed",
                "all of tpukern",
                "pip install 'torch>=2.13,<2.16' --index-url https://download.pytorch.org/whl/cpu",
            )
        ],
    ),
    "old jax": (
        {"jax": "0.9.0"},
        "emulated",
        [missing("jax is 0.9.0, expected >=0.10.2,<0.13", "all of tpukern", "pip install 'jax>=0.10.2,<0.13'")],
    ),
    "no compiler": (
        {"libtpu": None},
        "emulated",
        [missing("libtpu is not installed", "the TPU compiler", "pip install 'tpukern[compile]'")],
    ),
    "other plugin": (
        {"plugin": "0.12"},
        "emulated",
        [missing("plugin is 0.12, expected ==0.11.2", EMULATOR, "pip install 'tpukern[emulator]'")],
    ),
    "no device": (
        {"torch_tpu": None, "plugin": None},
        "none",
        [missing("torch_tpu is not installed; plugin is not installed", EMULATOR, "pip install 'tpukern[emulator]'")],
    ),
    "a TPU without its backend": (
        {"torch_tpu": None, "plugin": None},
        "tpu",
        [missing("torch_tpu is not installed", "the tpu device on a TPU", "pip install 'tpukern[tpu]'")],
    ),
    "a TPU without the emulator": ({"plugin": None}, "tpu", []),
    "no helion": (
        {"helion": None},
        "emulated",
        [missing("helion is not installed", "kernels written in Helion", "pip install 'tpukern[helion]'", required=False)],
    ),
}


@pytest.fixture
def installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def make(kind: str, **versions: str | None) -> None:
        monkeypatch.setattr(doctor_module, "requirements", lambda: an_installation(**versions))
        monkeypatch.setattr(device, "kind", lambda: kind)
        monkeypatch.setenv("TPUKERN_CACHE_DIR", str(tmp_path))

    return make


@pytest.mark.parametrize("case", CASES)
def test_what_is_missing(installation: Any, case: str) -> None:
    versions, kind, expected = CASES[case]
    installation(kind, **versions)
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert found["missing"] == expected
    ok = not any(item["required"] for item in expected)
    assert (found["ok"], result.exit_code) == (ok, 0 if ok else 1)
    assert found["device"]["kind"] == kind


def test_without_wheels_nothing_mends_the_device(installation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installation("none", torch_tpu=None, plugin=None)
    monkeypatch.setattr(doctor_module.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(doctor_module.platform, "machine", lambda: "arm64")
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    what = f"torch_tpu has no build for Darwin arm64, Python {sys.version_info.major}.{sys.version_info.minor}"
    assert json.loads(result.stdout)["missing"] == [
        missing(what, f"{EMULATOR} (kernels run on CPU tensors)", "", required=False)
    ]
    assert result.exit_code == 0


def test_for_a_reader(installation: Any, tmp_path: Path) -> None:
    installation("emulated", libtpu=None, helion="1.4")
    result = CliRunner().invoke(cli, ["doctor"])
    assert (result.exit_code, result.stderr) == (1, "")
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[2].split() == ["package", "installed", "wanted", "extra"]
    assert [line.split() for line in lines if line.startswith(("torch_tpu", "libtpu"))] == [
        ["libtpu", "-", "==0.0.51", "compile", "missing"],
        ["torch_tpu", "0.2.0", "==0.2.0", "tpu,", "emulator", "ok"],
    ]
    flags = "--xla_disable_hlo_passes=associative-scan-rewriter"
    assert lines[-8:] == [
        "extras: compile no, tpu yes, emulator yes, helion no, test yes",
        f"device: {device.description()}",
        f"on it XLA runs with {flags}, else scans (cumsum, ...) would abort the process",
        f"cache: {tmp_path} (0 results, 0.00 of 256.00 MiB)",
        "",
        "missing: libtpu is not installed; needed for the TPU compiler. Run: pip install 'tpukern[compile]'",
        "optional: helion is 1.4, expected ==1.5.1; needed for kernels written in Helion. Run: pip install 'tpukern[helion]'",
        "Something needed is missing.",
    ]


def test_the_command_itself_loads_nothing_heavy(tmp_path: Path) -> None:
    source = (
        "import sys\nfrom tpukern.cli import cli\nstatus = cli.main(['doctor', '--json'], standalone_mode=False)\n"
        "print(sorted({'torch', 'jax', 'torch_tpu', 'libtpu', 'helion'} & set(sys.modules)), status, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    facts = json.loads(done.stdout)
    assert done.stderr == f"[] {0 if facts['ok'] else 1}\n"
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
