"""A kernel's source digest changes with whatever its behaviour depends on, and with nothing else."""

import importlib.util
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tpukern.dsl import Block, Dim, In, Kernel, Out, Ref, kernel

HELPER = "def double(x):\n    return x * {factor}\n"
KERNEL = """
import json
import numpy
from dsl_source_helper import double
from tpukern.dsl import Block, Dim, In, Out, Ref, kernel

@kernel
def f(x: Ref = In("r d"), y: Ref = Out("r d"), *, r: Dim = Block(8)) -> None:
    y[...] = double(x[...])
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernel]:
    """Writes and loads a kernel's module and the module it gets a function from."""

    def load_module(name: str, text: str) -> types.ModuleType:
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    def load(factor: int = 2, body: str = KERNEL) -> Kernel:
        load_module("dsl_source_helper", HELPER.format(factor=factor))
        found: Kernel = load_module("dsl_source_kernel", body).f
        return found

    return load


def test_files_are_those_outside_of_libraries_and_the_language(load: Callable[..., Kernel]) -> None:
    names = {path.name for path in load().source_files()}
    assert {"dsl_source_kernel.py", "dsl_source_helper.py", "tile.py", "grid.py", "geometry.py"} <= names
    assert not names & {"numeric.py", "decoder.py", "pallas_call.py", "errors.py"}


def test_digest_sees_the_module_and_what_it_reaches(load: Callable[..., Kernel]) -> None:
    first = load().source_digest()
    assert load().source_digest() == first
    assert load(factor=3).source_digest() != first
    assert load(body=KERNEL + "\n# a comment").source_digest() != first
    assert load(body=KERNEL.replace("* 1", "* 1")).source_digest() == first


def scaling(factor: float, fill: float = 0) -> Kernel:
    @kernel
    def f(x: Ref = In("r d", fill=fill), y: Ref = Out("r d"), *, r: Dim = Block(8)) -> None:
        y[...] = x[...] * factor

    return f


def test_digest_sees_variables_of_an_enclosing_function_and_the_declaration() -> None:
    assert scaling(2.0).source_digest() == scaling(2.0).source_digest()
    assert scaling(2.0).source_digest() != scaling(3.0).source_digest()
    assert scaling(2.0).source_digest() != scaling(2.0, fill=1).source_digest()


FACTOR = 2


@kernel
def by_global(x: Ref = In("r d"), y: Ref = Out("r d"), *, r: Dim = Block(8)) -> None:
    y[...] = x[...] * FACTOR


def test_digest_sees_globals_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    first = by_global.source_digest()
    monkeypatch.setitem(globals(), "FACTOR", 3)
    assert by_global.source_digest() != first


def test_digest_of_a_kernel_without_a_file() -> None:
    """As in a notebook: the code itself counts."""

    def made(factor: int) -> Kernel:
        names: dict[str, object] = {}
        source = KERNEL.replace("from dsl_source_helper import double", f"def double(x): return x * {factor}")
        exec(compile(source, "<cell>", "exec"), names)
        found = names["f"]
        assert isinstance(found, Kernel)
        return found

    assert made(2).source_digest() == made(2).source_digest()
    assert made(2).source_digest() != made(3).source_digest()
    np.testing.assert_array_equal(made(3)(jnp.ones((8, 128))), np.full((8, 128), 3))


def test_digest_is_the_same_in_another_process() -> None:
    code = "from tpukern.kernels.matmul import matmul; print(matmul.source_digest())"
    digests = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env={"PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64
