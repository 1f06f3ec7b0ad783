"""Mutants: where faults are found, what a mutant is, and what becomes of it."""

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tpukern.dsl import Block, Dim, In, Kernel, Out, Ref, kernel
from tpukern.errors import ConfigError
from tpukern.testing.mutation import Report, faults, forget, judge, mutant, mutate

MINE = """
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpukern.dsl import F32, Acc, Block, Dim, Each, In, Out, Ref, dot, kernel

SHARE = 0.25


def scaled_reference(x, w):
    return x * w / 4


def share(v):
    return v * SHARE


def unused(v):
    return v + 1


@kernel(op="mutation_tests::scaled", reference=scaled_reference, tolerance=2, dtypes=("float32",))
def scaled(x: Ref = In("*r d"), w: Ref = In("_ d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 16)) -> None:
    y[...] = share(x[...].astype(F32) * w[...])


@scaled.backward
def scaled_backward(x: jax.Array, w: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
    return {"dx": dy * w / 4, "dw": jnp.sum(dy * x, axis=tuple(range(x.ndim - 1))) / 4}


def product_reference(x, w):
    return x @ w


@kernel(reference=product_reference, tolerance=4, dtypes=("float32",))
def product(
    x: Ref = In("m k"), w: Ref = In("k n"), y: Ref = Out("m n"), acc: Ref = Acc("m n"), *,
    m: Dim = Block(8), k: Dim = Block(128),
) -> None:
    acc[...] += dot(x[...], w[...])

    @pl.when(k.last)
    def _() -> None:
        y[...] = acc[...]


def loose_reference(x):
    return x * 2


@kernel(reference=loose_reference, tolerance=1e9, dtypes=("float32",))
def loose(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 16)) -> None:
    y[...] = x[...] * 2.5


def copied(signature, config):
    def body(x, y, window, arrived):
        copy = pltpu.make_async_copy(x, window, arrived)
        copy.start()
        copy.wait()
        y[...] = window[...] * 2.0

    def call(x):
        return pl.pallas_call(
            body,
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
            name="copies",
        )(x)

    return call


@kernel(build=copied, reference=loose_reference, tolerance=1, dtypes=("float32",))
def copies(x: Ref = In("8 d"), y: Ref = Out("8 d")) -> None: ...


def updated_reference(x, new):
    import torch

    return torch.cat([new, x[8:]])


def updated(signature, config):
    def body(x, new, y, arrived):
        copy = pltpu.make_async_copy(new, y.at[pl.ds(0, 8)], arrived)
        copy.start()
        copy.wait()

    def call(x, new):
        anywhere = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            body, in_specs=[anywhere, anywhere], out_specs=anywhere, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_shapes=[pltpu.SemaphoreType.DMA], input_output_aliases={0: 0}, name="updates",
        )(x, new)

    return call


@kernel(build=updated, reference=updated_reference, tolerance=1, dtypes=("float32",))
def updates(x: Ref = In("16 d"), new: Ref = In("8 d"), y: Ref = Out("16 d")) -> None: ...
"""
FEW: dict[str, Any] = {"examples": 2}


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("mutants") / "mutation_tests_kernels.py"
    path.write_text(MINE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]


def fault(kernel: Kernel, kind: str, what: str) -> Any:
    found = [f for f in faults(kernel) if f.kind == kind and what in f.what]
    assert len(found) == 1, (kind, what, [str(f) for f in faults(kernel)])
    return found[0]


def test_faults_come_from_what_the_kernel_reaches(mine: Any) -> None:
    found = {(f.direction, f.where, f.kind, f.what) for f in faults(mine.scaled) if f.line is not None}
    assert found >= {
        ("forward", "SHARE", "wrong scale", "0.25 -> 0.5"),
        ("forward", "share", "wrong scale", "SHARE -> (SHARE * 2)"),
        ("forward", "share", "wrong scale", "v * SHARE -> (v)"),
        ("forward", "scaled", "cast dropped", "x[...].astype(F32) -> (x[...])"),
        ("forward", "scaled", "precision lowered", 'x[...].astype(F32) -> (x[...]).astype("bfloat16")'),
        ("forward", "scaled", "dropped write", "y[...] = share(x[...].astype(F32) * w[...]) -> pass"),
        ("backward", "scaled_backward", "gradient dropped", "dy * w / 4 -> (dy * w / 4) * 0"),
        ("backward", "scaled_backward", "swapped operands", "dy * w / 4 -> ((4) / (dy * w))"),
        ("backward", "scaled_backward", "wrong function", "jnp.sum -> jnp.mean"),
    }
    assert {where for _, where, _, _ in found} == {"SHARE", "share", "scaled", "scaled_backward"}


def test_faults_come_from_the_traced_program_too(mine: Any) -> None:
    found = {(f.kind, f.what) for f in faults(mine.product) if f.line is None}
    assert found == {
        ("off-by-one block", "operand 0 is fetched a block too early along axis 0"),
        ("off-by-one block", "operand 0 is fetched a block too early along axis 1"),
        ("off-by-one block", "operand 1 is fetched a block too early along axis 0"),
        ("off-by-one block", "output 0 is fetched a block too early along axis 0"),
        ("swapped index map", "operand 0 is walked along axes 1 and 0 instead of 0 and 1"),
        ("dropped last step", "the grid ends a step early along axis 0"),
        ("dropped last step", "the grid ends a step early along axis 1"),
        ("grid order", "the grid's axes 0 and 1 change places"),
        ("missing ragged edge", "tail 0 is not filled"),
        ("missing ragged edge", "tail 1 is not filled"),
        ("precision lowered", "dot 0 is computed at DEFAULT"),
        ("precision unstated", "dot 0 says no precision"),
        ("unordered grid", "axis 1 of the grid is called parallel"),
    }


def test_a_limit_takes_every_kind_first(mine: Any) -> None:
    every = faults(mine.scaled)
    groups = {(f.kind, f.where) for f in every}
    few = faults(mine.scaled, limit=len(groups), seed=1)
    assert {(f.kind, f.where) for f in few} == groups
    assert faults(mine.scaled, limit=len(groups), seed=1) == few
    assert faults(mine.scaled, limit=len(groups), seed=2) != few


def test_shipped_kernels_have_enough_faults() -> None:
    from tpukern import kernels

    found = [f for name in ("flash_attention", "linear", "rms_norm") for f in faults(getattr(kernels, name))]
    assert len(found) >= 150
    assert len({f.kind for f in found}) >= 20
    assert {f.direction for f in found} == {"forward", "backward"}
    assert not [f for f in found if f.where in ("reference", "unsupported", "forward_cond")]


def test_a_mutant_is_a_kernel_of_its_own(mine: Any) -> None:
    before = Path(mine.__file__).read_bytes()
    made = mutant(mine.scaled, fault(mine.scaled, "wrong scale", "v * SHARE -> (v)"))
    assert isinstance(made, Kernel)
    assert made is not mine.scaled
    assert made.op is None
    assert "share(x[...].astype(F32)" in inspect.getsource(made.fn)
    assert "return (v)" in inspect.getsource(made.fn.__globals__["share"])
    assert "return v * SHARE" in inspect.getsource(mine.share)
    assert Path(mine.__file__).read_bytes() == before
    assert made.fn.__module__ in sys.modules
    forget(made)
    assert made.fn.__module__ not in sys.modules


@pytest.mark.parametrize(
    ("name", "kind", "what", "state", "by"),
    [
        ("scaled", "wrong scale", "SHARE -> (SHARE * 2)", "caught", "parity"),
        ("scaled", "gradient dropped", "dy * w / 4", "caught", "parity"),
        ("scaled", "dropped write", "", "caught", "written_everywhere"),
        ("scaled", "off-by-one block", "operand 0", "caught", "parity"),
        ("scaled", "cast dropped", "", "equivalent", ""),
        ("product", "missing ragged edge", "tail 1", "caught", "written_everywhere"),
        ("product", "precision unstated", "", "caught", "parity"),
        ("product", "swapped dims in a contract", "", "refused", "written_everywhere"),
        ("product", "unordered grid", "", "caught", "semantics"),
        ("copies", "unsynchronised DMA", "copy.wait() -> pass", "caught", "semantics"),
        ("copies", "unsynchronised DMA", "copy.start() -> pass", "caught", "semantics"),
        ("updates", "stale alias", "output 0 is no longer written over operand 0", "caught", "semantics"),
    ],
)
def test_what_becomes_of_mutants(mine: Any, name: str, kind: str, what: str, state: str, by: str) -> None:
    chosen = getattr(mine, name)
    outcome = judge(chosen, fault(chosen, kind, what), **FEW)
    assert (outcome.state, outcome.property) == (state, by), outcome.what
    assert outcome.json()["state"] == state


def test_a_survivor_is_explained_and_counted(mine: Any) -> None:
    seen: list[Any] = []
    report = mutate(mine.loose, limit=None, on_outcome=seen.append, **FEW)
    assert tuple(seen) == report.outcomes
    survivor = next(o for o in report.outcomes if o.fault.what == "2.5 -> 5.0")
    assert survivor.state == "survived"
    assert survivor.what.startswith("y (float32) is off by ")
    assert survivor.what.endswith("; the bound is 1e+09")
    caught, survived = len(report.of("caught")), len(report.of("survived"))
    assert report.rate == caught / (caught + survived) < 1
    written = report.json()
    assert (written["mutants"], written["survived"], written["seed"]) == (len(seen), survived, 0)
    assert Report(outcomes=(), examples=2, seed=0).rate == 1


def test_a_kernel_without_reference_cannot_be_judged() -> None:
    @kernel
    def bare(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = Block(8, 16)) -> None:
        y[...] = x[...]

    with pytest.raises(ConfigError) as caught:
        faults(bare)
    assert str(caught.value) == "bare[config]: it has no reference; expected one, for mutants to be judged by."
