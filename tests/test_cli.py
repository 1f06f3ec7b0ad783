"""The command line as a whole: errors and their exit statuses, names, list, show, and how light it is."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import tpukern
import tpukern.kernels as tpukern_kernels
from tpukern.cli import cli

COMMANDS = ["doctor", "list", "show", "compile", "verify", "mutate", "estimate", "tune", "records", "report", "trace"]
COMMANDS += ["port", "run", "cache"]
KERNELS = list(tpukern_kernels.__all__)
RMS_NORM_WORKLOADS = [
    "llama3_8b_prefill",
    "llama3_8b_train",
    "llama3_8b_train_f32",
    "qwen3_8b_query_norm",
    "qwen3_30b_a3b_prefill",
]
TARGETS = ["v4", "v5e", "v5p", "v6e", "v7x"]

USER = """
print("imported")
from tpukern.dsl import Block, Dim, In, Out, Ref, Workload, kernel

@kernel(workloads=(Workload("small", r=16, d=128),))
def double(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 16, 64, default=16)) -> None:
    y[...] = x[...] * 2

@kernel
def broken(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 16)) -> None:
    raise ValueError("own words")

@kernel(workloads=(Workload("odd", directions=("backward",), r=16, d=128),))
def nowhere(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 16)) -> None:
    y[...] = x[...]

number = 7
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's kernels, which is the current one; sys.path and sys.modules are as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", sys.modules)
    (tmp_path / "mine.py").write_text(USER)
    (tmp_path / "raises.py").write_text("x = 1\nraise RuntimeError('no luck')\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "unreadable.py").write_text("x = = 1\n")
    (tmp_path / "rule.py").write_text("import tpukern\nraise tpukern.SignatureError('k', 'a finding', 'a rule')\n")
    yield tmp_path  # type: ignore[misc]
    for name in ("mine", "raises", "exits", "unreadable", "rule"):
        sys.modules.pop(name, None)


def tpukern_command(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


def assert_error(words: list[str], status: int, message: str) -> None:
    """The one message, on stderr or as JSON, and nothing else."""
    result = tpukern_command(*words)
    assert (result.exit_code, result.stdout, result.stderr) == (status, "", f"error: {message}\n")
    result = tpukern_command(*words, "--json")
    assert (result.exit_code, result.stderr) == (status, "")
    assert json.loads(result.stdout) == {"error": message}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lst"], f"tpukern: no command 'lst'; expected one of {COMMANDS}. Did you mean 'list'. See 'tpukern --help'."),
        (["xyzzy"], f"tpukern: no command 'xyzzy'; expected one of {COMMANDS}. See 'tpukern --help'."),
        (
            ["cache", "inof"],
            "tpukern cache: no command 'inof'; expected one of ['clear', 'info', 'path']. Did you mean 'info'. "
            "See 'tpukern cache --help'.",
        ),
        (
            ["cache", "info", "more"],
            "tpukern cache info: got unexpected extra argument (more). See 'tpukern cache info --help'.",
        ),
        (["compile", "rms_norm"], "tpukern compile: missing option '--target'. See 'tpukern compile --help'."),
        (
            ["compile", "rms_norm", "--target", "v5e", "--workload", "a", "--shape", "r=1"],
            "tpukern compile: --workload and --shape exclude each other. See 'tpukern compile --help'.",
        ),
    ],
)
def test_usage_errors(words: list[str], message: str) -> None:
    assert_error(words, 2, message)


ONE = ["--target", "v5e"]
NAMES = [
    (
        ["show", "rms_nrm"],
        f"kernel[config]: no kernel 'rms_nrm'; expected one of {KERNELS}, FILE.py:NAME or MODULE:NAME. "
        "Did you mean 'rms_norm'.",
    ),
    (
        ["compile", "rms_norm", "--target", "v5e,v6"],
        f"target[config]: no target 'v6'; expected one of {TARGETS}. Did you mean 'v6e'.",
    ),
    (
        ["compile", "rms_norm", *ONE, "--workload", "llama3_8b"],
        f"rms_norm[config]: no workload 'llama3_8b'; expected one of {RMS_NORM_WORKLOADS}. Did you mean 'llama3_8b_train'.",
    ),
    (
        ["compile", "rms_norm", *ONE, "--config", "block_rr=64"],
        "rms_norm[config]: no config key 'block_rr'; expected one of ['block_r', 'order']. Did you mean 'block_r'.",
    ),
    (
        ["compile", "rms_norm", *ONE, "--config", "block_r"],
        "config[config]: 'block_r' in 'block_r'; expected key=value, separated by commas.",
    ),
    (
        ["compile", "rms_norm", *ONE, "--direction", "forward", "--config", "block_r=12"],
        "rms_norm[config]: block_r = 12; expected a multiple of 8, or at least the size of the dim.",
    ),
    (
        ["compile", "rms_norm", *ONE, "--shape", "r:8,d=128"],
        "rms_norm[config]: cannot read 'r:8' in --shape 'r:8,d=128'; expected NAME=VALUE,NAME=VALUE.",
    ),
    (
        ["compile", "rms_norm", *ONE, "--shape", "r=8,d=128,r=8"],
        "rms_norm[config]: 'r' twice in --shape 'r=8,d=128,r=8'; expected each name once.",
    ),
    (
        ["compile", "rms_norm", *ONE, "--shape", "r=8,dd=128"],
        "rms_norm, workload r=8,dd=128[config]: no dim or static argument 'dd'; expected one of ['r', 'd', 'eps']. "
        "Did you mean 'd'.",
    ),
    (["show", "rms_norm", "--target", "v5e,v6e"], "show[config]: 2 targets in 'v5e,v6e'; expected one."),
    (["show", "mine.py"], "kernel[config]: 'mine.py' names a file and no kernel in it; expected mine.py:NAME."),
    (["show", "other.py:double"], "kernel[config]: no file 'other.py'; expected a Python file."),
    (
        ["show", "mine.py:duoble"],
        "kernel[config]: no kernel 'duoble' in mine.py; expected one of ['double', 'broken', 'nowhere']. "
        "Did you mean 'double'.",
    ),
    (
        ["show", "mine.py:number"],
        "kernel[config]: int, not a kernel, under 'number' in mine.py; expected one of ['double', 'broken', 'nowhere'].",
    ),
    (
        ["show", "raises.py:k"],
        "kernel[config]: importing raises.py raised RuntimeError: no luck (raises.py line 2); expected a module that imports.",
    ),
    (
        ["show", "exits.py:k"],
        "kernel[config]: importing exits.py raised SystemExit: 3 (exits.py line 2); expected a module that imports.",
    ),
    (
        ["show", "unreadable.py:k"],
        "kernel[config]: importing unreadable.py raised SyntaxError: invalid syntax (unreadable.py, line 1); "
        "expected a module that imports.",
    ),
    (["show", "rule.py:k"], "k[signature]: a finding; expected a rule."),
    (
        ["show", "no.such:k"],
        "kernel[config]: importing no.such raised ModuleNotFoundError: No module named 'no'; expected a module that imports.",
    ),
    (
        ["show", "mine.py:broken", *ONE],
        "broken[config]: no workload is declared; expected a shape. Give one with --shape.",
    ),
    (
        ["compile", "mine.py:double", *ONE, "--direction", "backward"],
        "double[config]: no direction 'backward'; expected one of ['forward'].",
    ),
    (
        ["compile", "mine.py:nowhere", *ONE],
        "nowhere[config]: no workload with direction 'forward'; expected a workload that claims it.",
    ),
]


@pytest.mark.parametrize(("words", "message"), NAMES, ids=[" ".join(words) for words, _ in NAMES])
def test_names_that_are_none(user: Path, words: list[str], message: str) -> None:
    result = tpukern_command(*words)
    printed = "imported\n" if "mine.py:" in words[1] else ""
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"{printed}error: {message}\n")
    result = tpukern_command(*words, "--json")
    assert (result.exit_code, result.stderr) == (1, printed)
    assert json.loads(result.stdout) == {"error": message}


def test_the_dtype_suggestion_is_one_of_the_kernels() -> None:
    assert_error(
        ["show", "rms_norm", "--dtype", "float16"],
        1,
        "rms_norm[config]: no dtype 'float16'; expected one of ['bfloat16', 'float32']. Did you mean 'bfloat16'.",
    )


def test_a_defect_is_named_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("inside")

    monkeypatch.setattr("tpukern.cli.listing.shipped", fail)
    message = (
        "KeyError: 'inside'. This is a defect in tpukern; 'python -X dev -m tpukern.cli' with the same arguments shows where."
    )
    assert_error(["list"], 1, message)


def test_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tpukern.cli.listing.shipped", interrupt)
    result = tpukern_command("list", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (130, {"error": "interrupted."})


def test_list() -> None:
    result = tpukern_command("list", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert list(rows) == KERNELS
    assert {"flash_attention", "matmul", "rms_norm", "swiglu"} <= set(rows)
    row = rows["rms_norm"]
    assert [w.pop("name") for w in row.pop("workloads")] == RMS_NORM_WORKLOADS
    assert row == {
        "name": "rms_norm",
        "op": "tpukern::rms_norm",
        "frontend": "pallas",
        "dtypes": ["bfloat16", "float32"],
        "directions": ["forward", "backward"],
        "overrides": [
            {"op": "aten::_fused_rms_norm", "keys": ["PrivateUse1"], "opt_in": False},
            {"op": "aten::_fused_rms_norm_backward", "keys": ["PrivateUse1"], "opt_in": False},
            {"op": "aten::rms_norm", "keys": ["PrivateUse1", "AutogradPrivateUse1"], "opt_in": False},
        ],
        "targets": TARGETS,
    }


def test_the_targets_of_a_kernel_that_rejects() -> None:
    from tpukern.cli.listing import describe
    from tpukern.dsl import Block, Dim, In, Out, Ref, Workload, kernel

    def reject(config: Any, signature: Any, target: Any) -> str | None:
        small = target is not None and target.vmem_bytes < 2**26
        return "too small a VMEM" if small or config["block_r"] == 8 else None

    @kernel(workloads=(Workload("one", r=16, d=128),), reject=reject)
    def picky(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 16)) -> None:
        y[...] = x[...]

    assert describe(picky)["targets"] == ["v5e", "v5p", "v6e", "v7x"]


def test_list_as_a_table() -> None:
    result = tpukern_command("list")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["name", "op", "frontend", "dtypes", "directions", "overrides", "workloads", "targets"]
    first = next(line for line in lines if line.startswith("rms_norm"))
    assert "aten::_fused_rms_norm " in first
    assert first.rstrip().endswith("v4, v5e, v5p, v6e, v7x")
    assert "aten::mm*" in result.stdout


BOUND = ["show", "mine.py:double", "--target", "v6e"]


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("bound", ["double", "block_r", "16"]),
        ("pallas", ["double: grid (", "bf16[16,128] <- "]),
        ("mosaic", ["func.func", "vector<16x128xbf16>"]),
        ("stablehlo", ["stablehlo.custom_call", "tpu_custom_call", "tensor<16x128xbf16>"]),
    ],
)
def test_show(user: Path, stage: str, words: list[str]) -> None:
    result = tpukern_command(*BOUND, "--stage", stage)
    assert result.exit_code == 0, result.stderr
    for word in words:
        assert word in result.stdout, word
    found = tpukern_command(*BOUND, "--stage", stage, "--json")
    shown = json.loads(found.stdout)
    texts = shown.pop("texts")
    assert "\n\n".join(texts) + "\n" == result.stdout
    assert shown == {
        "kernel": "double",
        "direction": "forward",
        "workload": "small",
        "dtype": "bfloat16",
        "target": "v6e",
        "config": {"block_r": 16},
        "stage": stage,
    }


def test_show_takes_shape_dtype_and_config(user: Path) -> None:
    words = ["--shape", "r=4x32,d=256", "--dtype", "f32", "--config", "block_r=8", "--stage", "mosaic", "--json"]
    shown = json.loads(tpukern_command(*BOUND, *words).stdout)
    assert (shown["workload"], shown["dtype"], shown["config"]) == ("r=4x32,d=256", "float32", {"block_r": 8})
    assert "vector<8x256xf32>" in shown["texts"][0]


def test_a_body_that_raises(user: Path) -> None:
    result = tpukern_command("show", "mine.py:broken", "--shape", "r=16,d=128", "--stage", "mosaic", "--target", "v5e")
    message = f"broken[lower] on v5e: ValueError: own words, at {user / 'mine.py'}:11; expected a body that Pallas can lower."
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"imported\nerror: {message}\n"


SCRIPT = str(Path(sysconfig.get_path("scripts")) / "tpukern")


def console(folder: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *words], cwd=folder, capture_output=True, text=True, timeout=300, **options)


@pytest.mark.parametrize("command", [[SCRIPT], [sys.executable, "-m", "tpukern.cli"]])
def test_both_ways_in(tmp_path: Path, command: list[str]) -> None:
    done = subprocess.run([*command, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"tpukern {tpukern.__version__}\n", "")


def test_the_console_script(user: Path) -> None:
    done = console(user, "show", "mine:double", "--json")
    assert (done.returncode, done.stderr) == (0, "imported\n")
    assert json.loads(done.stdout)["kernel"] == "double"
    done = console(user, "lst")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_file_that_imports_torch_does_not_start_the_device(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    text = (user / "mine.py").read_text()
    (user / "mine.py").write_text(f"import sys, torch\n{text}print('torch_tpu' in sys.modules)\n")
    done = console(user, "show", "mine:double", "--json")
    assert (done.returncode, done.stderr) == (0, "imported\nFalse\n")


def test_a_group_without_a_command_prints_its_help() -> None:
    for words in ([], ["cache"]):
        result = tpukern_command(*words)
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout == tpukern_command(*words, "--help").stdout


@pytest.mark.parametrize(
    ("words", "heavy"), [(["--help"], []), (["compile", "--help"], []), (["run", "--help"], []), (["list", "--json"], ["jax"])]
)
def test_what_a_command_loads(tmp_path: Path, words: list[str], heavy: list[str]) -> None:
    source = (
        f"import sys\nfrom tpukern.cli import cli\nstatus = cli.main({words!r}, standalone_mode=False)\n"
        "known = {'torch', 'jax', 'torch_tpu', 'libtpu', 'helion', 'rich'}\n"
        "print(sorted(known & set(sys.modules)), status, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stderr == f"{heavy} 0\n"


@pytest.mark.parametrize("words", ["list", "list --json", "show rms_norm --stage pallas"])
def test_a_closed_pipe_is_no_traceback(tmp_path: Path, words: str) -> None:
    command = f"set -o pipefail; {SCRIPT} {words} 2>said | true"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    said = (tmp_path / "said").read_text()
    assert "Error" not in said
    assert done.returncode == 1
