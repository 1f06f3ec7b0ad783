"""Imports point one way, `import tpukern` is cheap, and the repository's folders are no top-level packages."""

import ast
import importlib.util
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "torch_tpu", "jax", "jaxlib", "helion", "libtpu", "numpy", "rich", "click")

# What a module may import, lowest first: anything of a lower layer, and its own layer. A package stands for all its modules.
LAYERS = (
    ("tpukern.errors", "tpukern.version", "tpukern.targets", "tpukern.environment"),
    (
        "tpukern.jax_adapter",
        "tpukern.jaxprs",
        "tpukern.torch_tpu_adapter",
        "tpukern.pjrt_cpu",
        "tpukern.helion_adapter",
        "tpukern.helion_host",
    ),
    ("tpukern.emulated_attention", "tpukern.emulated_ops"),
    ("tpukern.device",),
    ("tpukern.dsl", "tpukern.value_names", "tpukern.autotune.recording", "tpukern.autotune.recalling"),
    ("tpukern.kernels",),
    ("tpukern.lowering", "tpukern.cache", "tpukern.compiling", "tpukern.worker", "tpukern.worker_pool"),
    (
        "tpukern.calling",
        "tpukern.choosing",
        "tpukern.dispatch",
        "tpukern.explanation",
        "tpukern.launching",
        "tpukern.overriding",
        "tpukern.registry",
        "tpukern.routing",
        "tpukern.scoping",
        "tpukern.running",
        "tpukern.tagging",
        "tpukern.torch_ops",
    ),
    ("tpukern.testing", "tpukern.autotune", "tpukern.verify", "tpukern.porting"),
    ("tpukern.cli",),
)


def sources() -> list[tuple[str, Path]]:
    """Every module of the packages, by its import name."""
    found = []
    for folder, package in (
        (ROOT / "tpukern", "tpukern"),
        *((ROOT / n, f"tpukern.{n}") for n in ("dsl", "kernels", "autotune")),
    ):
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder)
            if folder.name == "tpukern" and inside.parts[0] in ("dsl", "kernels", "autotune"):
                continue  # the links
            parts = [package, *inside.with_suffix("").parts]
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


SOURCES = sources()
NAMES = {name for name, _ in SOURCES}
SURFACE = {"tpukern.dsl.kernel", "tpukern.compile"}  # a function and a module of one name: the function is what is imported


def is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def imports(tree: ast.AST, *, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Yields (module, inside a function) of every import that runs; names imported from a package count as modules."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and is_type_checking(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                is_module = deeper in NAMES and deeper not in SURFACE
                yield deeper if is_module else node.module or "", inside
        else:
            yield from imports(node, inside=inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def layer_of(module: str) -> int | None:
    for depth, names in enumerate(LAYERS):
        if any(module == name or module.startswith(name + ".") for name in names):
            return depth
    return None


def test_every_module_has_a_layer() -> None:
    assert [name for name, _ in SOURCES if name != "tpukern" and layer_of(name) is None] == []
    assert len(SOURCES) > 30


@pytest.mark.parametrize(("name", "path"), SOURCES, ids=[name for name, _ in SOURCES])
def test_imports_point_down(name: str, path: Path) -> None:
    mine = layer_of(name)
    for module, inside in imports(ast.parse(path.read_text())):
        root = module.split(".")[0]
        assert root not in ("dsl", "kernels", "autotune"), f"{module}: import it as tpukern.{module}"
        if name.startswith("tpukern.kernels"):
            allowed = module in ("tpukern.dsl", "tpukern.kernels") or module.startswith("tpukern.kernels.") or root != "tpukern"
            assert allowed, f"{module}: kernels import the surface of tpukern.dsl only"
            assert root != "torch" or inside, "kernels import torch inside functions only"
        if mine is not None and root == "tpukern" and module != "tpukern":
            theirs = layer_of(module)
            assert theirs is not None, f"{module} has no layer"
            assert theirs <= mine, f"{module} is above {name}"
        if name == "tpukern.dsl" or name.startswith("tpukern.dsl."):
            assert root not in ("helion", "libtpu", "torch_tpu"), module
            assert root != "torch" or inside, "tpukern.dsl imports torch inside functions only"


def test_the_only_upward_call_is_to_dispatch() -> None:
    """What the table above cannot see: modules imported by name. `tpukern/__init__.py` looks its exports up so."""
    named = {}
    for name, path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr == "import_module" and isinstance(node, ast.Call):
                target = node.args[0]
                if isinstance(target, ast.Constant) and str(target.value).startswith("tpukern"):
                    named.setdefault(name, set()).add(target.value)
    upward = {
        name: {module for module in modules if (layer_of(module) or 0) > (layer_of(name) or 0)}
        for name, modules in named.items()
    }
    assert {name: modules for name, modules in upward.items() if modules} == {"tpukern.dsl.kernel": {"tpukern.dispatch"}}


def test_nothing_else_in_the_repository_imports_the_bare_folders() -> None:
    for folder in ("tests", "benchmarks", "examples", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not {n.split(".")[0] for n in names} & {"dsl", "kernels", "autotune"}, path


def python(code: str, cwd: Path, **environment: str) -> str:
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


TORCH = ("torch", "torch_tpu", "helion")


@pytest.mark.parametrize(
    ("module", "not_loaded"),
    [("tpukern", HEAVY), ("tpukern.cli", (*TORCH, "jax", "jaxlib", "libtpu", "numpy"))]
    + [(module, TORCH) for module in ("tpukern.dsl", "tpukern.kernels")],
)
def test_what_an_import_loads(module: str, not_loaded: tuple[str, ...], tmp_path: Path) -> None:
    """JAX imports the Python package `libtpu` to learn where the compiler is; the compiler itself must not be mapped."""
    code = f"import {module}, sys, json; print(json.dumps([sorted(sys.modules), open('/proc/self/maps').read()]))"
    loaded, mapped = json.loads(python(code, tmp_path))
    assert module in loaded
    assert [name for name in not_loaded if name in loaded] == []
    assert "libtpu.so" not in mapped


def seconds(code: str, cwd: Path) -> float:
    """CPU seconds of a Python that runs `code`: unlike the clock's, they do not depend on what else the machine does."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    python(code, cwd)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_importing_tpukern_is_cheap(tmp_path: Path) -> None:
    bare = min(seconds("pass", tmp_path) for _ in range(5))
    ours = min(seconds("import tpukern", tmp_path) for _ in range(5))
    assert ours - bare < 0.15


def test_the_folders_are_no_top_level_packages(tmp_path: Path) -> None:
    """Other libraries probe for a package called `kernels`: in this process and in a fresh one they find none of ours."""
    code = "import importlib.util as u, json; print(json.dumps([getattr(u.find_spec(n), 'origin', None) for n in %r]))"
    names = ("dsl", "kernels", "autotune")
    here = [getattr(importlib.util.find_spec(name), "origin", None) for name in names]
    for origin in (*here, *json.loads(python(code % (names,), tmp_path))):
        assert origin is None or not Path(origin).is_relative_to(ROOT)
    assert ROOT not in [Path(entry).resolve() for entry in sys.path]
