"""Bound -> Lowered: what is in it, what changes its digest, and what refusals say."""

import importlib.util
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpukern import lowering
from tpukern.dsl import Block, Dim, In, Out, Ref, kernel, using
from tpukern.errors import ConfigError, LowerError, SignatureError
from tpukern.targets import TARGETS

S = jax.ShapeDtypeStruct
X = S((64, 128), jnp.float32)


def bound(function, *specs, name="demo", target=None):
    """A plain JAX callable where a Bound is wanted."""
    return types.SimpleNamespace(kernel=types.SimpleNamespace(name=name), function=function, specs=specs, target=target)


def call(body, x, **keywords):
    spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
    grid = (x.shape[0] // 8,)
    return pl.pallas_call(body, grid=grid, in_specs=[spec], out_specs=spec, out_shape=S(x.shape, x.dtype), **keywords)(x)


def double(x):
    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2.0

    return call(body, x, name="double")


@kernel(op="tests::scale", dtypes=("float32",))
def scale(x: Ref = In("r d"), y: Ref = Out("r d"), *, factor: float = 2.0, r: Dim = Block(8, 16)) -> None:
    y[...] = x[...] * factor


@pytest.mark.parametrize("target", TARGETS)
def test_texts_are_readable_and_without_locations(target):
    lowered = lowering.lower(bound(double, X), target)
    assert lowered.target is TARGETS[target]
    assert len(lowered.mosaic) == 1
    assert "arith.mulf" in lowered.mosaic[0]
    assert "memref<8x128xf32, #tpu.memory_space<vmem>>" in lowered.mosaic[0]
    assert "iteration_bounds = array<i64: 8>" in lowered.mosaic[0]
    assert "stablehlo.custom_call @tpu_custom_call" in lowered.stablehlo
    assert "<mosaic 0>" in lowered.stablehlo
    for text in (lowered.stablehlo, *lowered.mosaic):
        assert "loc(" not in text
        assert pathlib.Path(__file__).name not in text
    assert b"tpu_custom_call" in lowered.module
    assert re.fullmatch(r"[0-9a-f]{64}", lowered.digest)


def source(shift: int, operation: str = "x_ref[...] + 1.0") -> str:
    return "\n" * shift + (
        "import jax\n"
        "from jax.experimental import pallas as pl\n"
        "def body(x_ref, y_ref):\n"
        f"    y_ref[...] = {operation}\n"
        "def program(x):\n"
        "    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)\n"
    )


def program(folder: pathlib.Path, name: str, text: str):
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.program


def test_the_digest_sees_meaning_not_place(tmp_path):
    first = lowering.lower(bound(program(tmp_path, "first", source(0)), X), "v5e")
    moved = lowering.lower(bound(program(tmp_path, "moved", source(7)), X), "v5e")
    other = lowering.lower(bound(program(tmp_path, "other", source(0, "x_ref[...] + 2.0")), X), "v5e")
    assert first.module != moved.module  # locations are in the bytes
    assert (first.digest, first.mosaic, first.stablehlo) == (moved.digest, moved.mosaic, moved.stablehlo)
    assert first.digest != other.digest


def test_the_digest_sees_what_stands_outside_the_body():
    limits = [pltpu.CompilerParams(vmem_limit_bytes=n) for n in (1 << 20, 1 << 21)]

    def body(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    one, two = (lowering.lower(bound(lambda x, p=p: call(body, x, compiler_params=p), X), "v5e") for p in limits)
    assert one.mosaic == two.mosaic
    assert one.digest != two.digest
    assert "1048576" in one.stablehlo


def test_several_kernels_come_in_program_order():
    def body(operation):
        def run(x_ref, y_ref):
            y_ref[...] = operation(x_ref[...])

        return run

    def both(x):
        return call(body(jnp.exp), call(body(jnp.tanh), x))

    mosaic = lowering.lower(bound(both, X), "v6e").mosaic
    assert [("math.tanh" in text, "math.exp" in text) for text in mosaic] == [(True, False), (False, True)]


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_may_ask_for_the_chip(target):
    def body(x_ref, y_ref):
        y_ref[...] = jnp.sign(x_ref[...]) * float(pltpu.get_tpu_info().num_mxus)

    text = lowering.lower(bound(lambda x: call(body, x), X), target).mosaic[0]
    mxus = {"v4": 4, "v5e": 4, "v5p": 4, "v6e": 2, "v7x": 2}[target]
    assert f"{mxus}.000000e+00" in text


def test_a_trace_in_interpret_form_does_not_leak_into_a_lowering():
    signature = scale.signature(X)
    one = scale.bind_signature(signature)
    assert one.function(jnp.ones(X.shape))[0][0, 0] == 2.0  # traced in interpret form, kept by JAX
    fresh = lowering.lower(scale.bind_signature(signature), "v5e")
    with using(interpret=True):
        assert lowering.lower(one, "v5e").digest == fresh.digest
    assert len(fresh.mosaic) == 1


def test_a_bound_kernel_is_lowered_for_its_own_target_unless_another_is_named():
    mine = scale.bind(X, target=TARGETS["v6e"], block_r=16)
    assert lowering.lower(mine).target.name == "v6e"
    assert lowering.lower(mine, "v5e").target.name == "v5e"
    assert "memref<16x128xf32" in lowering.lower(mine).mosaic[0]


def test_statics_are_in_the_digest():
    assert lowering.lower(scale.bind(X), "v5e").digest != lowering.lower(scale.bind(X, factor=3.0), "v5e").digest


def test_no_target():
    with pytest.raises(ConfigError) as caught:
        lowering.lower(scale.bind(X))
    assert str(caught.value) == (
        "scale[config]: no target; expected one of ['v4', 'v5e', 'v5p', 'v6e', 'v7x']. Bind for a target, or name one."
    )


def line_of(marker: str) -> int:
    lines = pathlib.Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {marker}"))


def test_a_body_that_raises_is_named_with_its_line_and_keeps_the_cause():
    def body(x_ref, y_ref):
        raise RuntimeError("boom")  # the raising line

    with pytest.raises(LowerError) as caught:
        lowering.lower(bound(lambda x: call(body, x), X), "v5e")
    where = f"{__file__}:{line_of('the raising line')}"
    assert str(caught.value) == f"demo[lower] on v5e: RuntimeError: boom, at {where}; expected a body that Pallas can lower."
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert (caught.value.subject, caught.value.target) == ("demo", "v5e")


def test_a_body_that_raises_without_a_message():
    def body(x_ref, y_ref):
        assert x_ref.shape == (1,)  # the bare assertion

    with pytest.raises(LowerError) as caught:
        lowering.lower(bound(lambda x: call(body, x), X), "v6e")
    where = f"{__file__}:{line_of('the bare assertion')}"
    assert re.fullmatch(
        rf"demo\[lower\] on v6e: AssertionError(: .*)?, at {re.escape(where)}; expected a body that Pallas can lower\.",
        str(caught.value),
    )


def test_an_operation_that_mosaic_lacks_is_named_with_the_kernels_line():
    def body(x_ref, y_ref):
        y_ref[...] = jax.lax.sort(x_ref[...])  # the sort

    with pytest.raises(LowerError) as caught:
        lowering.lower(bound(lambda x: call(body, x), X), "v5e")
    assert str(caught.value) == (
        "demo[lower] on v5e: NotImplementedError: Unimplemented primitive in Pallas TPU lowering for tc: sort, at"
        f" {__file__}:{line_of('the sort')}; expected a body that Pallas can lower."
    )


def test_a_block_that_pallas_refuses_is_quoted_whole():
    def thin(x):
        spec = pl.BlockSpec((3, 128), lambda i: (i, 0))
        return pl.pallas_call(lambda x_ref, y_ref: None, grid=(2,), in_specs=[spec], out_shape=S((8, 128), x.dtype))(x)

    with pytest.raises(LowerError, match=r"divisible by 8 and 128 .* block shape \(.*3.*, .*128.*\)"):
        lowering.lower(bound(thin, X), "v5e")


def test_our_own_errors_pass_through():
    def body(x_ref, y_ref):
        raise SignatureError("inner", "found", "rule")

    with pytest.raises(SignatureError) as caught:
        lowering.lower(bound(lambda x: call(body, x), X), "v5e")
    assert str(caught.value) == "inner[signature]: found; expected rule."


def test_keyboard_interrupts_pass_through():
    def body(x_ref, y_ref):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lowering.lower(bound(lambda x: call(body, x), X), "v5e")
