"""Every code block of the README and of the guide to kernels runs as it stands there."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sysconfig.get_path("scripts")
BLOCK = re.compile(r"^```(\w+) ?([\w.]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document: str, language: str) -> list[tuple[str, str]]:
    """(the word after the language, text) of every block in that language."""
    found = BLOCK.findall((ROOT / document).read_text())
    return [(name, text) for kind, name, text in found if kind == language]


def commands(document: str) -> list[str]:
    return [line for _, text in blocks(document, "sh") for line in text.splitlines()]


def run(command: list[str], cwd: Path) -> str:
    """Runs it with the commands of this Python's environment first on PATH, and no make above it."""
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    env["PATH"] = SCRIPTS + os.pathsep + env["PATH"]
    done = subprocess.run(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader is, having saved what they were told to: in the checkout's place, as far as the commands see."""
    here = tmp_path_factory.mktemp("reader")
    (here / "examples").symlink_to(ROOT / "examples")
    for name, text in blocks("README.md", "python"):
        (here / name).write_text(text)
    (here / "guide.py").write_text("\n".join(text for _, text in blocks("docs/kernels.md", "python")))
    return here


def test_nothing_is_left_out() -> None:
    """A block in another language, or one that does not parse as a block, would run in no test."""
    for document, languages in (("README.md", {"python", "sh"}), ("docs/kernels.md", {"python", "sh"})):
        text = (ROOT / document).read_text()
        found = BLOCK.findall(text)
        assert {kind for kind, _, _ in found} == languages
        assert text.count("\n```") == 2 * len(found)
    assert [name for name, _ in blocks("README.md", "python")] == ["first.py"]
    assert {name for name, _ in blocks("docs/kernels.md", "python")} == {"guide"}


@pytest.mark.parametrize("command", [c for c in commands("README.md") if c.startswith("tpukern ")])
def test_a_command_of_the_readme(command: str, folder: Path) -> None:
    out = run(shlex.split(command), folder)
    match command.split()[1]:
        case "run" if "first.py" in command:
            assert float(out) < 1e-5
        case "run":
            assert re.search(r"^ +5 +\d\.\d+ ", out, re.MULTILINE)
        case "compile":
            assert len(re.findall(r"^softcap .* yes ", out, re.MULTILINE)) == 6
        case "show":
            assert "softcap" in out
        case "estimate":
            assert len(re.findall(r"^softcap .* replay ", out, re.MULTILINE)) == 4
        case "list":
            assert {"rms_norm", "flash_attention", "matmul", "swiglu"} <= set(out.split())
        case "doctor":
            assert "emulated" in out or "tpu" in out
        case _:
            pytest.fail(f"say here what {command} has to print")


def test_the_other_commands_of_the_readme(folder: Path) -> None:
    """`make demo` runs short, in this environment; `make test` is what is running now; activating is what `run` does."""
    others = [c for c in commands("README.md") if not c.startswith("tpukern ")]
    assert others == ["make demo", "make test", ". .venv/bin/activate"]
    assert shutil.which("activate", path=SCRIPTS, mode=os.R_OK)
    here = f"VENV={Path(SCRIPTS).parent}"
    plan = run(["make", "-C", str(ROOT), "-n", "test", here], folder)
    assert f'{SCRIPTS}/pytest"' in plan
    short = f"DEMO=--steps 30 --compile swiglu --targets v6e --folder {shlex.quote(str(folder / 'demo'))}"
    out = run(["make", "-C", str(ROOT), "-o", "install", "demo", here, short], folder)
    assert re.search(r"^The demo passed in \d+ s", out, re.MULTILINE)
    assert out.count("The curves match: at most ") == 2


def test_the_guide_is_a_program(folder: Path) -> None:
    out = run([sys.executable, "-W", "error", "-W", "ignore::UserWarning", "guide.py"], folder)
    assert "relu2" in out


@pytest.mark.parametrize("command", commands("docs/kernels.md"))
def test_a_command_of_the_guide(command: str, folder: Path) -> None:
    assert command.startswith("tpukern ")
    out = run(shlex.split(command), folder)
    assert "relu2" in out or "product" in out


def test_links_lead_somewhere() -> None:
    for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_every_document_is_in_the_index() -> None:
    text = (ROOT / "docs" / "index.md").read_text()
    assert [p.name for p in sorted((ROOT / "docs").glob("*.md")) if p.name != "index.md" and f"({p.name})" not in text] == []


def test_the_map_of_folders_is_true() -> None:
    named = set(re.findall(r"`(\w+)/`", (ROOT / "README.md").read_text()))
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {path.split("/")[0] for path in tracked if "/" in path and not path.startswith(".")}
    assert named == folders
