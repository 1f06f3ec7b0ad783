"""Each question of a verdict, on a kernel that is right and on one that is wrong in just that way."""

import itertools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from tpukern.dsl import F32, Acc, Block, Config, Dim, In, Kernel, Out, Ref, Scratch, dot, kernel
from tpukern.dsl.frozen import FrozenMapping
from tpukern.kernels import flash_attention, linear, rms_norm
from tpukern.targets import target
from tpukern.testing import on_chip, programs, properties, reference, strategies, strides
from tpukern.testing.findings import Finding
from tpukern.testing.properties import Session
from tpukern.testing.strategies import Case

if TYPE_CHECKING:
    from torch import Tensor

R, D = Block(8, 16), Block(128, 256)
TOLERANCE = 4


def square_reference(x: "Tensor") -> "Tensor":
    return x * x


def squares(body: Any, op: str | None = None, **options: Any) -> Kernel:
    """Returns a kernel of one input that has a body, differentiated as a square is."""

    @kernel(op=op, reference=square_reference, tolerance=TOLERANCE, name=body.__name__, **options)
    def made(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = R) -> None:
        body(x, y, r)

    @made.backward
    @kernel
    def made_backward(x: Ref = In("*r d"), dy: Ref = In("*r d"), dx: Ref = Out("*r d"), *, r: Dim = R) -> None:
        dx[...] = (2 * x[...].astype(F32) * dy[...].astype(F32)).astype(dx.dtype)

    return made


def right(x: Ref, y: Ref, r: Dim) -> None:
    y[...] = (x[...].astype(F32) ** 2).astype(y.dtype)


def edge(k: Kernel, dtype: str = "float32") -> Case:
    return Case(point=next(p for p in strategies.just_above(k, 0) if p.dtype == dtype))


def rich(k: Kernel, dtype: str = "float32") -> Case:
    return Case(point=next(p for p in strategies.rich(k, 0) if p.dtype == dtype))


def only(found: Any) -> Finding:
    real = [f for f in (found if not isinstance(found, Finding) else [found]) if f is not None]
    assert len(real) >= 1
    return real[0]


GOOD = squares(right, op="verify_tests::square")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_found_in_a_right_kernel(dtype: str) -> None:
    session, case = Session(GOOD), rich(GOOD, dtype)
    assert properties.parity(session, case) is None
    assert properties.deterministic(session, case, again=True) is None
    assert on_chip.written_everywhere(session, case) is None
    assert properties.finite_difference(session, case) is None
    assert list(properties.batch_invariant(session, case)) == [None, None]
    assert list(properties.configs_agree(session, case, count=2, seed=0)) == [None, None]
    assert list(on_chip.arithmetic(session, case)) == []
    assert on_chip.semantics(session, edge(GOOD, dtype)) == []
    assert list(strides.strides(session, edge(GOOD, dtype))) == [None] * 4
    assert 0 < session.worst["y", dtype].ulps < 1


def test_a_wrong_output_and_a_wrong_gradient() -> None:
    def biased(x: Ref, y: Ref, r: Dim) -> None:
        y[...] = (1.001 * x[...].astype(F32) ** 2).astype(y.dtype)

    k = squares(biased)
    found = only(properties.parity(Session(k), rich(k)))
    assert (found.property, found.direction, found.output) == ("parity", "forward", "y")
    assert found.ulps is not None
    assert 100 < found.ulps < 1e5
    assert found.what.startswith("y is off by ")
    assert found.what.endswith("; the bound is 4")

    @kernel(reference=square_reference, tolerance=TOLERANCE)
    def halved(x: Ref = In("*r d"), y: Ref = Out("*r d"), *, r: Dim = R) -> None:
        y[...] = x[...] * x[...]

    @halved.backward
    def halved_backward(x: jax.Array, dy: jax.Array) -> dict[str, jax.Array]:
        return {"dx": x * dy}

    found = only(properties.parity(Session(halved), rich(halved)))
    assert (found.direction, found.output) == ("backward", "dx")
    assert properties.parity(Session(halved, ("forward",)), rich(halved)) is None


def test_float32_that_is_computed_in_bfloat16() -> None:
    def short(x: Ref, y: Ref, r: Dim) -> None:
        y[...] = (x[...].astype(jnp.bfloat16) ** 2).astype(y.dtype)

    k = squares(short)
    assert only(properties.parity(Session(k), rich(k))).output == "y"
    assert properties.parity(Session(k), rich(k, "bfloat16")) is None


def test_a_reference_whose_gradient_is_not_its_own() -> None:
    def detached(x: "Tensor") -> "Tensor":
        return x * x.detach()

    k = squares(right)
    k.reference = detached
    found = only(properties.finite_difference(Session(k), rich(k)))
    assert found.property == "finite_difference"
    assert found.got is not None
    assert found.want == pytest.approx(2 * found.got, rel=1e-3)


def test_no_finite_difference_is_asked_for_where_it_jumps() -> None:
    def stairs(x: "Tensor") -> "Tensor":
        return x * 0 + (1000 * x).round()

    k = squares(right)
    k.reference = stairs
    assert properties.finite_difference(Session(k), rich(k)) is None


def test_a_config_that_is_wrong() -> None:
    def tall(x: Ref, y: Ref, r: Dim) -> None:
        y[...] = (x[...].astype(F32) ** 2).astype(y.dtype)
        if r.block > 8:
            y[...] = y[...] + 1

    k = squares(tall)
    found = only(properties.configs_agree(Session(k), rich(k), count=3, seed=0))
    assert (found.property, found.output) == ("configs_agree", "y")
    assert found.case is not None
    assert found.case.point.forward["block_r"] == 16


def test_two_outputs_of_a_flaky_kernel() -> None:
    ticks = itertools.count(1)

    def flaky(x: Ref, y: Ref, r: Dim) -> None:
        y[...] = (x[...].astype(F32) ** 2 * (1 + 2.0**-20 * next(ticks))).astype(y.dtype)

    k = squares(flaky)
    found = only(properties.deterministic(Session(k), rich(k), again=True))
    assert found.what == f"not deterministic: traced twice y[0, 0] is {found.got!r} and {found.want!r}"
    assert found.got != found.want


def test_rows_that_know_each_other() -> None:
    def mixed(x: Ref, y: Ref, r: Dim) -> None:
        v = x[...].astype(F32)
        y[...] = (v * v + 1e-30 * jnp.sum(v[:8])).astype(y.dtype)

    k = squares(mixed)
    session = Session(k)
    found = only(properties.batch_invariant(session, rich(k)))
    assert (found.property, found.output) == ("batch_invariant", "y")
    assert found.what.endswith("when other entries of r hold NaN")


def test_a_tail_that_is_not_written() -> None:
    def skipped(x: Ref, y: Ref, r: Dim) -> None:
        @pl.when(r.index == 0)
        def _() -> None:
            y[...] = (x[...].astype(F32) ** 2).astype(y.dtype)

    k = squares(skipped)
    found = only(on_chip.written_everywhere(Session(k), edge(k)))
    assert (found.property, found.direction, found.output) == ("written_everywhere", "forward", "y")
    assert found.what == "64 of 576 elements of y are not written, from [8, 0] on"
    found = only(on_chip.semantics(Session(k), edge(k)))
    assert (found.property, found.direction) == ("semantics", "forward")


def test_memory_that_is_read_before_it_is_written() -> None:
    @kernel(reference=square_reference, tolerance=TOLERANCE)
    def stale(x: Ref = In("*r d"), y: Ref = Out("*r d"), old: Ref = Scratch("8 128"), *, r: Dim = R) -> None:
        y[...] = (x[...].astype(F32) ** 2 + jnp.where(old[0, 0] > -1.0, 0.0, 1.0)).astype(y.dtype)
        old[...] = jnp.zeros(old.shape)

    found = only(on_chip.semantics(Session(stale), edge(stale)))
    assert found.property == "semantics"
    assert found.what.startswith("uninitialised in stale in grid step (0,): output 0, ")
    assert "is read before it is written" in found.what


def product_reference(x: "Tensor", w: "Tensor") -> "Tensor":
    return x @ w


def products(multiply: Any) -> Kernel:
    @kernel(reference=product_reference, tolerance=TOLERANCE, dtypes=("float32",))
    def product(
        x: Ref = In("m k"), w: Ref = In("k n"), y: Ref = Out("m n"), acc: Ref = Acc("m n"), *, m: Dim = R, k: Dim = D
    ) -> None:
        acc[...] += multiply(x[...], w[...])

        @pl.when(k.last)
        def _() -> None:
            y[...] = acc[...].astype(y.dtype)

    return product


def test_dots_and_the_precision_that_they_state() -> None:
    plain = products(lambda x, w: jnp.dot(x, w, preferred_element_type=F32))
    found = only(on_chip.arithmetic(Session(plain), edge(plain)))
    assert found.what == (
        "a dot of float32[8,128] and float32[128,64] in product states no precision; use tpukern.dsl.dot, or say precision="
    )
    assert only(properties.parity(Session(plain), rich(plain))).output == "y"  # bfloat16 passes, as on the chip
    stated = products(dot)
    assert list(on_chip.arithmetic(Session(stated), edge(stated))) == []
    assert properties.parity(Session(stated), rich(stated)) is None
    high = products(lambda x, w: jnp.dot(x, w, precision="high", preferred_element_type=F32))
    found = only(properties.parity(Session(high), rich(high)))
    assert found.property == "arithmetic"
    assert "states HIGH" in found.what


def test_an_exception_names_its_line() -> None:
    def broken(x: Ref, y: Ref, r: Dim) -> None:
        raise RuntimeError("own words")

    k = squares(broken)
    found = only(properties.parity(Session(k), rich(k)))
    assert found.what.startswith("it raises RuntimeError in broken, line ")
    assert found.what.endswith(": own words")


def test_the_compiler_judges_every_chip_and_direction() -> None:
    good = list(on_chip.compiles(Session(GOOD), [rich(GOOD).point], [target("v5e")]))
    assert good == [None, None]

    def sorted_rows(x: Ref, y: Ref, r: Dim) -> None:
        y[...] = jnp.sort(x[...], axis=1)

    k = squares(sorted_rows)
    found = only(on_chip.compiles(Session(k, ("forward",)), [rich(k).point], [target("v5e")]))
    assert (found.property, found.direction) == ("compiles", "forward")
    assert found.what.startswith("v5e: ")


def test_layouts_hold_what_they_should() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for layout in ("transposed", "offset", "every second"):
        tensor = strides.laid_out(array, layout)
        assert np.array_equal(tensor.numpy(), array)
        assert not tensor.is_contiguous()
    repeated = strides.laid_out(array, "repeated")
    assert repeated.stride()[0] == 0
    assert np.array_equal(repeated.numpy()[1], array[0])


def test_the_reference_is_asked_of_operands_not_of_cases() -> None:
    """Of one case `strides` has several operands ("repeated" ones differ), configs have the same ones."""
    session, case = Session(GOOD), edge(GOOD)
    plan = programs.plan(GOOD, case.point)
    operands = plan.operands(case)
    told = session.references.of(plan, operands)
    assert session.references.of(plan, [a.copy() for a in operands]) is told
    configs = strategies.with_configs(GOOD, case.point, "largest", np.random.default_rng(0))
    assert session.references.of(programs.plan(GOOD, configs), operands) is told
    repeated = [reference.array(strides.laid_out(a, "repeated")) for a in operands]
    other = session.references.of(plan, repeated)
    assert other is not told
    np.testing.assert_array_equal(other.exact["y"], np.square(repeated[0].astype(np.float64)))
    assert session.references.of(programs.plan(GOOD, case.point, gradient=False), operands[:1]) is not told
    assert properties.parity(session, case) is None
    assert list(strides.strides(session, case)) == [None] * 4


def test_a_torch_op_that_writes_to_its_input_is_judged_by_what_it_was_given() -> None:
    def through(kernel: Kernel, plan: programs.Plan, tensors: Any) -> Any:
        tensors[0].mul_(2)  # what follows is right for what is there now
        return {"y": np.square(reference.array(tensors[0]))}

    case = edge(GOOD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strides, "through_torch", through)
        found = [f for f in strides.strides(Session(GOOD, ("forward",)), case) if f is not None]
    assert any(f.what.startswith("inputs offset: y is off by ") for f in found)


def test_a_program_that_does_not_end() -> None:
    def endless(x: Ref, y: Ref, r: Dim) -> None:
        v = x[...].astype(F32)
        y[...] = jax.lax.while_loop(lambda s: s[0, 0] < 1e30, lambda s: s * 0, v * v).astype(y.dtype)

    k = squares(endless)
    assert on_chip.may_hang(Session(k), rich(k).point)
    assert not on_chip.may_hang(Session(GOOD), rich(GOOD).point)
    found = only(on_chip.semantics(Session(k, ("forward",), timeout=2), edge(k)))
    assert "still running after 2 s" in found.what
    assert "in grid step (" in found.what
    assert programs.within(0.05, lambda: __import__("time").sleep(1)) is None


def test_a_product_that_is_flushed_before_rstd_makes_it_large_again_is_no_fault() -> None:
    """x and w near 1e-13: their product with n is below float32's normal numbers, and 1/sqrt(eps) would have made it normal."""
    kinds = FrozenMapping({"x": "tiny", "w": "tiny", "dy": "one_hot"})
    forward, backward = Config({"block_r": 8}), Config({"block_r": 8})
    sizes, statics = FrozenMapping({"r": (1,), "d": 3}), FrozenMapping({"eps": 8e-06})
    point = strategies.Point(dtype="bfloat16", sizes=sizes, statics=statics, forward=forward, backward=backward)
    session = Session(rms_norm)
    assert properties.parity(session, Case(point=point, kinds=kinds)) is None
    session.programs.close()


def test_a_gradient_whose_overflow_hangs_on_the_last_bit_of_the_logsumexp_is_no_fault() -> None:
    """Scores near 1e18 have no digits after 1e11: exp(s - lse) is 0 or infinite, and infinite times 0 is NaN."""
    blocks = {f"flash_attention_{part}.block_{dim}": 128 for part in ("dkv", "dq") for dim in "ij"}
    point = strategies.Point(
        dtype="float32",
        sizes=FrozenMapping({"b": (1,), "hk": 1, "g": 1, "i": 1, "d": 8, "j": 276, "e": 1}),
        statics=FrozenMapping({"scale": 1.0}),
        forward=Config({"block_i": 128, "block_j": 256}),
        backward=Config({**blocks, "flash_attention_dkv.block_j": 256}),
    )
    session, case = Session(flash_attention), Case(point=point, kinds=FrozenMapping({"k": "huge"}))
    program = session.programs[point]
    results = program.run(program.plan.operands(case))
    assert np.isnan(results["dk"]).any()
    assert properties.parity(session, case) is None

    def poisoned(operands: Any, seed: int | None = None) -> Any:
        return {**results, "dk": np.full_like(results["dk"], np.nan)}

    program.run = poisoned  # type: ignore[method-assign]
    found = only(properties.parity(session, case))  # what is NaN whatever the last bit is a fault
    assert (found.property, found.output) == ("parity", "dk")
    session.programs.close()


def test_an_infinity_times_a_tiny_number_reaches_its_result() -> None:
    """x near 1e-16: no finite number in the place of w's -inf moves relu(x w + b), and -inf makes it 0."""
    blocks = {"block_m": 128, "block_n": 128, "block_k": 128}
    sizes, statics = FrozenMapping({"m": (1,), "k": 1, "n": 63}), FrozenMapping({"act": "relu"})
    point = strategies.Point(dtype="bfloat16", sizes=sizes, statics=statics, forward=Config(blocks))
    session = Session(linear, ("forward",))
    assert properties.parity(session, Case(point=point, kinds=FrozenMapping({"x": "tiny", "w": "inf"}))) is None
    session.programs.close()
