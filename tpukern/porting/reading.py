"""Finds what ties a project to CUDA, in its sources alone."""

import ast
import dataclasses
import io
import os
import re
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from tpukern.errors import ConfigError
from tpukern.porting.coverage import PACKAGES, covered

Status = Literal["edit", "by hand", "uncovered"]

SKIPPED: Final = frozenset({"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"})
CUDA_SUFFIXES: Final = (".cu", ".cuh")
GLOBAL: Final = re.compile(r"__global__\s+(?:\w+\s+)*?(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(")
DEVICE: Final = re.compile(r"cuda(:\d+)?")
EXTENSIONS: Final = ("load", "load_inline", "CUDAExtension")
ACCELERATOR: Final = ("is_available", "device_count", "synchronize")  # the same in torch.accelerator
WRITE_ONE: Final = "Write it as a kernel: docs/kernels.md, docs/helion.md."


@dataclasses.dataclass(frozen=True)
class Edit:
    """Text that stands for another: offsets are into the UTF-8 bytes of the file."""

    start: int
    stop: int
    text: str


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that ties the project to CUDA.

    Attributes:
        path: The file, relative to the project.
        line: Its line, from 1.
        kind: "import", "call", "triton kernel", "cuda source", "extension", "guard", "device", "cuda api" or "unreadable".
        what: The name or text found.
        status: "edit" if `--write` changes it, "by hand" if something covers it, "uncovered" if nothing does.
        change: What to do.
        arguments: What is not covered of a call, as "name=value: why".
        edit: The change, where it is mechanical.
    """

    path: str
    line: int
    kind: str
    what: str
    status: Status
    change: str
    arguments: tuple[str, ...] = ()
    edit: Edit | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found in a project.

    Attributes:
        root: The folder that the findings' paths are relative to.
        files: How many sources were read.
        findings: By path and line.
    """

    root: Path
    files: int
    findings: tuple[Finding, ...]

    def count(self, status: Status) -> int:
        return sum(f.status == status for f in self.findings)


def read(path: Path) -> Report:
    """Reads a file, or every source of a folder.

    Args:
        path: A file, or a folder; hidden folders, environments and builds in it are left out, links are not followed.

    Raises:
        ConfigError: There is no such path, no source in it, or it cannot be read.
    """
    if not path.exists():
        raise ConfigError("port", f"no file or folder {str(path)!r}", "the path of a project")
    root = path if path.is_dir() else path.parent
    sources = sorted(_sources(path))
    if not sources:
        raise ConfigError("port", f"no source in {str(path)!r}", "files that end in .py, .cu or .cuh")
    findings: list[Finding] = []
    for source in sources:
        name = source.relative_to(root).as_posix()
        try:
            data = source.read_bytes()
        except OSError as error:
            raise ConfigError("port", f"{str(source)!r} cannot be read: {error.strerror}", "a readable file") from error
        findings += _cuda(name, data) if source.suffix in CUDA_SUFFIXES else python(name, data)
    return Report(root, len(sources), tuple(findings))


def _sources(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for folder, folders, files in os.walk(path):
        folders[:] = [
            f for f in folders if f not in SKIPPED and not f.startswith(".") and "pyvenv.cfg" not in _names(folder, f)
        ]
        for name in files:
            found = Path(folder, name)
            if found.suffix in (".py", *CUDA_SUFFIXES) and found.is_file():
                yield found


def _names(folder: str, name: str) -> list[str]:
    try:
        return os.listdir(os.path.join(folder, name))
    except OSError:
        return []


def _cuda(path: str, data: bytes) -> list[Finding]:
    names = GLOBAL.findall(data.decode("utf-8", "replace"))
    what = ", ".join(names) or "no __global__ function"
    return [Finding(path, 1, "cuda source", what, "uncovered", WRITE_ONE)]


def python(path: str, data: bytes) -> list[Finding]:
    """Returns what is found in one Python source, by line."""
    try:
        text, _ = decoded(data)
        with warnings.catch_warnings(action="ignore"):  # of the project's string escapes
            tree = ast.parse(text)
    except (SyntaxError, ValueError, UnicodeDecodeError) as error:
        line = getattr(error, "lineno", None) or 1
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        return [Finding(path, line, "unreadable", reason, "uncovered", "Make it a Python 3 source.")]
    reader = _Reader(path, text)
    reader.visit(tree)
    return sorted(reader.findings, key=lambda f: (f.line, f.kind, f.what))


def decoded(data: bytes) -> tuple[str, str]:
    """Returns a Python source's text, its line ends as they are, and its encoding."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding


class _Reader(ast.NodeVisitor):
    def __init__(self, path: str, text: str) -> None:
        self.path, self.source = path, text.encode()
        self.findings: list[Finding] = []
        self.names: dict[str, str] = {}
        self.tests: set[int] = set()
        self.starts = [0]
        for line in self.source.split(b"\n"):
            self.starts.append(self.starts[-1] + len(line) + 1)

    def note(
        self,
        node: ast.expr | ast.stmt,
        kind: str,
        what: str,
        status: Status,
        change: str,
        *,
        arguments: tuple[str, ...] = (),
        edit: str | None = None,
    ) -> None:
        made = None if edit is None else Edit(*self.span(node), edit)
        self.findings.append(Finding(self.path, node.lineno, kind, what, status, change, arguments, made))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, stop = self.starts[node.lineno - 1], self.starts[node.end_lineno - 1]
        return start + node.col_offset, stop + node.end_col_offset

    def dotted(self, node: ast.expr) -> str:
        """Returns the full name that an expression stands for, "" if it is no name."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value)
            return f"{owner}.{node.attr}" if owner else ""
        return ""

    # Names

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.names[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
            if alias.name.split(".")[0] in PACKAGES:
                self.note(node, "import", alias.name, "by hand", "Take it out when its calls are replaced.")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            return
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            self.names[alias.asname or alias.name] = full
            if node.module.split(".")[0] in PACKAGES:
                self._imported(node, full)

    def _imported(self, node: ast.stmt, full: str) -> None:
        known = covered(full)
        if known is not None and known.instead:
            self.note(node, "import", full, "by hand", f"Instead: {known.instead}.")
        elif full in ("triton.jit", "triton.language"):
            return  # the kernels that use them are found
        else:
            self.note(node, "import", full, "uncovered", f"Nothing here does the same. {WRITE_ONE}")

    # Calls

    def visit_Call(self, node: ast.Call) -> None:
        name = self.dotted(node.func)
        if name.split(".")[0] in PACKAGES:
            self._call(node, name)
        elif name.startswith("torch.utils.cpp_extension.") and name.split(".")[-1] in EXTENSIONS:
            self.note(node, "extension", name, "uncovered", f"It builds CUDA sources. {WRITE_ONE}")
        elif name.startswith("torch.cuda."):
            self._api(node, name)
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            self._cuda_method(node, node.func)
        self.generic_visit(node)

    def _call(self, node: ast.Call, name: str) -> None:
        if name.split(".")[0] == "triton":
            return
        known = covered(name)
        if known is None or not known.instead:
            self.note(node, "call", name, "uncovered", f"Nothing here does the same. {WRITE_ONE}")
            return
        parameters = list(known.defaults)
        given = [(p, v) for p, v in zip(parameters, node.args, strict=False) if not isinstance(v, ast.Starred)]
        given += [(k.arg, k.value) for k in node.keywords if k.arg is not None]
        left = [
            f"{p}={ast.unparse(v)}: {known.limits[p]}"
            for p, v in given
            if p in known.limits and ast.unparse(v) != known.defaults[p]
        ]
        if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
            left.append("arguments that are unpacked cannot be read")
        unknown = [p for p, _ in given if p not in known.defaults]
        left += [f"{p}: not known of this function" for p in unknown]
        status: Status = "uncovered" if left else "by hand"
        self.note(node, "call", name, status, f"Instead: {known.instead}.", arguments=tuple(left))

    def _api(self, node: ast.Call, name: str) -> None:
        last = name.removeprefix("torch.cuda.")
        if last in ACCELERATOR and not node.args and not node.keywords and ast.unparse(node.func) == name:
            new = f"torch.accelerator.{last}"
            self.note(node.func, "cuda api", name, "edit", f"Write {new}().", edit=new)
        else:
            self.note(
                node, "cuda api", name, "by hand", "torch.accelerator has what all devices share; leave out what it lacks."
            )

    def _cuda_method(self, node: ast.Call, function: ast.Attribute) -> None:
        if node.args or node.keywords:
            self.note(node, "device", ".cuda(...)", "by hand", 'Write .to("tpu"), with the arguments that .to takes.')
            return
        self._suffix(node, function.value, "device", ".cuda()", '.to("tpu")')

    def _suffix(self, node: ast.expr, owner: ast.expr, kind: str, what: str, new: str) -> None:
        """Notes a change of what stands behind `owner`, if that is `what` as it is, without comments or brackets in it."""
        start, stop = self.span(owner)[1], self.span(node)[1]
        same = self.source[start:stop].decode() == what
        edit = Edit(start, stop, new) if same else None
        status: Status = "edit" if same else "by hand"
        self.findings.append(Finding(self.path, node.lineno, kind, what, status, f"Write {new}.", (), edit))

    # Guards, devices, Triton

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr == "is_cuda" and isinstance(node.ctx, ast.Load):
            if id(node) in self.tests:
                self._suffix(node, node.value, "guard", ".is_cuda", '.device.type == "tpu"')
            else:
                self.note(node, "guard", ".is_cuda", "by hand", 'Write (... .device.type == "tpu").')
        self.generic_visit(node)

    def _test(self, node: ast.expr) -> None:
        """Notes what a comparison may stand in for without brackets: a condition, and the operands of its and, or and not."""
        self.tests.add(id(node))
        if isinstance(node, ast.BoolOp):
            for value in node.values:
                self._test(value)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._test(node.operand)

    def visit_If(self, node: ast.If) -> None:
        self._test(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._test(node.test)
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        self._test(node.test)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and DEVICE.fullmatch(node.value):
            new = '"' + node.value.replace("cuda", "tpu") + '"'
            old = self.source[slice(*self.span(node))].decode()
            if old[:1] in ("'", '"') and old[1:-1] == node.value:
                new = old[0] + new[1:-1] + old[0]
                self.note(node, "device", old, "edit", f"Write {new}.", edit=new)
            else:
                self.note(node, "device", old, "by hand", f"Write {new}.")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value.startswith("cuda"):
            self.note(node, "device", ast.unparse(node), "by hand", "Write tpu for cuda.")
        for value in node.values:
            if not isinstance(value, ast.Constant):
                self.visit(value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for decorator in node.decorator_list:
            made = decorator.func if isinstance(decorator, ast.Call) else decorator
            if self.dotted(made) == "triton.jit":
                self.note(node, "triton kernel", node.name, "uncovered", WRITE_ONE)
        self.generic_visit(node)
