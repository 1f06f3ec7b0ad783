"""`tpukern port`: what it finds in sources, what it says of calls, and patches that apply."""

import ast
import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from tpukern.cli import cli
from tpukern.errors import ConfigError
from tpukern.porting import Finding, patch, read
from tpukern.porting.coverage import COVERAGE, PACKAGES
from tpukern.porting.reading import python

PROJECT = Path(__file__).parent.parent / "examples" / "cuda_project"


def found(source: str) -> list[Finding]:
    return python("a.py", source.encode())


def only(source: str, kind: str = "call") -> Finding:
    (finding,) = (f for f in found(source) if f.kind == kind)
    return finding


def test_the_example() -> None:
    report = read(PROJECT)
    assert report.files == 3
    assert [(f.path, f.line, f.kind, f.what, f.status) for f in report.findings] == [
        ("activation.py", 3, "import", "triton", "by hand"),
        ("activation.py", 4, "import", "triton.language", "by hand"),
        ("activation.py", 8, "triton kernel", "relu_squared", "uncovered"),
        ("model.py", 4, "import", "flash_attn.flash_attn_func", "by hand"),
        ("model.py", 5, "import", "liger_kernel.transformers.LigerRMSNorm", "by hand"),
        ("model.py", 12, "call", "liger_kernel.transformers.LigerRMSNorm", "by hand"),
        ("model.py", 13, "device", '"cuda"', "edit"),
        ("model.py", 17, "guard", ".is_cuda", "edit"),
        ("model.py", 18, "device", ".cuda()", "edit"),
        ("model.py", 20, "call", "flash_attn.flash_attn_func", "by hand"),
        ("model.py", 21, "call", "flash_attn.flash_attn_func", "uncovered"),
        ("model.py", 26, "cuda api", "torch.cuda.is_available", "edit"),
        ("model.py", 26, "device", '"cuda:0"', "edit"),
        ("scale.cu", 1, "cuda source", "scale_rows", "uncovered"),
    ]
    (window,) = (f for f in report.findings if f.arguments)
    assert window.arguments == ("window_size=(self.window, 0): no kernel for windows",)


def test_the_command(tmp_path: Path) -> None:
    written = tmp_path / "edits.patch"
    result = CliRunner().invoke(cli, ["port", str(PROJECT), "--json", "--write", str(written)])
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert said["summary"] == {"edit": 5, "by hand": 6, "uncovered": 3}
    assert said["findings"][2] == {
        "path": "activation.py",
        "line": 8,
        "kind": "triton kernel",
        "what": "relu_squared",
        "status": "uncovered",
        "change": "Write it as a kernel: docs/kernels.md, docs/helion.md.",
        "arguments": [],
    }
    assert written.read_bytes() == patch(read(PROJECT))


def test_a_project_without_cuda_passes(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import torch\nprint(torch.zeros(3, device='cpu'), 'cudagraph')\n")
    result = CliRunner().invoke(cli, ["port", str(tmp_path), "--write", str(tmp_path / "p")])
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == (
        "Nothing can be edited mechanically: no patch is written.\n1 files read: nothing ties them to CUDA.\n"
    )
    assert not (tmp_path / "p").exists()


SOURCES = {
    "unix": "x = 'cuda'\nif not y.is_cuda and z [0].is_cuda:\n    y = f(\n        y).cuda()\n",
    "windows": "x = 'cuda:1'\r\ny = y.cuda()\r\n",
    "no last newline": "é = 'ß'; x = y.to(\"cuda\").cuda()",
    "latin-1": "# coding: latin-1\nn = 'é'; x = n.cuda()\n",
    "utf-8-sig": "x = y.cuda()\n",
}
EDITED = {
    "unix": 'x = \'tpu\'\nif not y.device.type == "tpu" and z [0].device.type == "tpu":\n    y = f(\n        y).to("tpu")\n',
    "windows": "x = 'tpu:1'\r\ny = y.to(\"tpu\")\r\n",
    "no last newline": 'é = \'ß\'; x = y.to("tpu").to("tpu")',
    "latin-1": "# coding: latin-1\nn = 'é'; x = n.to(\"tpu\")\n",
    "utf-8-sig": 'x = y.to("tpu")\n',
}


@pytest.mark.parametrize("name", EDITED)
def test_a_patch_applies(name: str, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    source = project / "a b.py"
    encoding = name if name in ("latin-1", "utf-8-sig") else "utf-8"
    source.write_bytes(SOURCES[name].encode(encoding))
    written = tmp_path / "edits.patch"
    assert CliRunner().invoke(cli, ["port", str(project), "--write", str(written)]).exit_code == 1
    subprocess.run(["git", "apply", str(written)], cwd=project, check=True, env={"GIT_CEILING_DIRECTORIES": str(tmp_path)})
    assert source.read_bytes() == EDITED[name].encode(encoding)
    assert not any(f.edit for f in read(project).findings)


@pytest.mark.parametrize(
    ("source", "status", "arguments"),
    [
        ("import flash_attn as fa\nfa.flash_attn_func(q, k, v, 0.0, None, True)", "by hand", ()),
        (
            "import flash_attn\nflash_attn.flash_attn_func(q, k, v, 0.1)",
            "uncovered",
            ("dropout_p=0.1: no kernel for dropout; PyTorch's attention has it, with another mask",),
        ),
        (
            "from flash_attn.flash_attn_interface import flash_attn_func as f\nf(q, k, v, softcap=c, **more)",
            "uncovered",
            ("softcap=c: no kernel for capped scores", "arguments that are unpacked cannot be read"),
        ),
        (
            "from flash_attn import flash_attn_func as f\nf(q, k, v, widow=3)",
            "uncovered",
            ("widow: not known of this function",),
        ),
        ("from grouped_gemm import ops\nops.gmm(a, b, sizes)", "uncovered", ()),
    ],
)
def test_calls(source: str, status: str, arguments: tuple[str, ...]) -> None:
    finding = only(source)
    assert (finding.status, finding.arguments) == (status, arguments)


@pytest.mark.parametrize(
    ("source", "kind", "what", "status"),
    [
        ("from torch.utils.cpp_extension import load_inline\nload_inline('a')", "extension", "load_inline", "uncovered"),
        ("import triton\n@triton.jit(debug=True)\ndef f(): ...", "triton kernel", "f", "uncovered"),
        ("import torch\ntorch.cuda.synchronize(0)", "cuda api", "torch.cuda.synchronize", "by hand"),
        ("x.cuda(0)", "device", ".cuda(...)", "by hand"),
        ("x = y.is_cuda == z", "guard", ".is_cuda", "by hand"),
        ("d = f'cuda:{rank}'", "device", "f'cuda:{rank}'", "by hand"),
        ("d = 'cu' 'da'", "device", "'cu' 'da'", "by hand"),
        ("print 'a'", "unreadable", "", "uncovered"),
    ],
)
def test_kinds(source: str, kind: str, what: str, status: str) -> None:
    finding = only(source, kind)
    assert finding.status == status
    assert finding.edit is None
    assert finding.what.endswith(what)


def test_what_is_no_part_of_a_project_is_left_out(tmp_path: Path) -> None:
    for folder in (".git", "venv", "env/lib", "build", "kept"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("x = 'cuda'\n")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    assert [f.path for f in read(tmp_path).findings] == ["kept/a.py"]


@pytest.mark.filterwarnings("error")
def test_warnings_about_the_projects_sources_stay_away() -> None:
    assert found("x = '\\d' is y") == []


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "none")
    assert str(caught.value) == f"port[config]: no file or folder '{tmp_path / 'none'}'; expected the path of a project."
    with pytest.raises(ConfigError) as caught:
        read(tmp_path)
    assert str(caught.value) == f"port[config]: no source in '{tmp_path}'; expected files that end in .py, .cu or .cuh."
    result = CliRunner().invoke(cli, ["port", str(PROJECT), "--write", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: port[config]: the patch '{tmp_path}' cannot be written: Is a directory; expected a writable path.\n"
    )


def test_the_table_names_its_own_parameters_and_kernels_that_exist() -> None:
    from tpukern import kernels

    for (package, name), known in COVERAGE.items():
        assert package in PACKAGES
        assert set(known.limits) <= set(known.defaults), name
        for word in known.instead.replace(":", " ").replace("(", " ").replace(",", " ").split():
            if word.startswith("tpukern.kernels."):
                assert hasattr(kernels, word.removeprefix("tpukern.kernels.")), name
    named = [
        known.instead.split("kernel ")[1].split(",")[0].split(".")[0]
        for known in COVERAGE.values()
        if "kernel " in known.instead
    ]
    assert set(named) <= set(kernels.__all__)


def test_nothing_is_imported_to_read() -> None:
    for path in (Path(__file__).parent.parent / "tpukern" / "porting").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                assert module is not None
                assert module.split(".")[0] not in {"importlib", "runpy", "torch", "jax"}
