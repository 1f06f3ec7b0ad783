"""What is drawn from a declaration."""

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings

from tpukern import kernels
from tpukern.dsl import F32, Acc, Block, Choice, Dim, Each, In, Kernel, Out, Prefetch, Ref, Workload, kernel
from tpukern.testing import strategies
from tpukern.testing.strategies import Case

SHIPPED = [k for name in kernels.__all__ if (k := getattr(kernels, name)).frontend == "pallas"]


@kernel(workloads=[Workload("one", r=8, d=128, eps=1e-3)])
def statistics(
    x: Ref = In("*r d"),
    label: Ref = In("r _", "int32"),
    y: Ref = Out("*r d"),
    *,
    eps: float = 1e-6,
    scale: float | None = None,
    flag: bool = False,
    act: Literal["none", "relu"] = "none",
    unroll: int = Choice(1, 2),
    r: Dim = Block(8, 32, default=32),
) -> None:
    y[...] = x[...]


@kernel
def gathered(
    page: Ref = Prefetch("t"),
    table: Ref = In("p:page[t] d"),
    y: Ref = Out("t 8 d"),
    *,
    t: Dim = Each(),
    p: Dim = Block(8),
) -> None:
    y[...] = table[...]


@kernel
def carried(
    x: Ref = In("b i j"),
    y: Ref = Out("b i _"),
    acc: Ref = Acc("i _"),
    *,
    b: Dim = Each(),
    i: Dim = Block(8),
    j: Dim = Block(128),
) -> None:
    acc[...] += x[...].astype(F32)


def test_borders_of_a_block() -> None:
    assert strategies.borders(8) == (1, 9, 19, 7, 8, 16)
    assert strategies.borders(128) == (1, 129, 277, 127, 128, 256)
    assert 0 not in strategies.borders(1)


@pytest.mark.parametrize("k", SHIPPED, ids=lambda k: k.name)
def test_points_of_shipped_kernels(k: Kernel) -> None:
    found = strategies.points(k, 5, 3)
    assert found == strategies.points(k, 5, 3)
    assert found != strategies.points(k, 5, 4)
    assert {p.dtype for p in found} == set(k.dtypes)
    for dtype in k.dtypes:
        own = [p for p in found if p.dtype == dtype]
        assert sum(p.empty for p in own) == 1
        filled = [p.signature(k).sizes for p in own if not p.empty]
        for name in k.declaration.blocks:
            smallest = min(k.declaration.dims[name].choices)
            sizes = {s[name] for s in filled}
            assert 1 in sizes
            assert any(size > smallest and size % smallest for size in sizes), (name, sizes)
    for point in found:
        if not point.empty:
            k.bind_signature(point.signature(k), point.forward)
            assert k.gradient is not None
            k.gradient.bind_signature(k.gradient_signature(point.signature(k)), point.backward)


def test_every_static_argument_takes_every_value() -> None:
    tried = strategies.statics(statistics)
    assert tried == {
        "eps": (1e-6, 8e-6, 1.0, 1e-3),
        "scale": (None, 1.0, 0.25),
        "flag": (False, True),
        "act": ("none", "relu"),
    }
    used = {p.statics.get("act", "none") for p in strategies.points(statistics, 8, 0)}
    assert used == {"none", "relu"}


def test_rich_points_have_several_blocks_and_a_tail() -> None:
    for point in strategies.rich(kernels.flash_attention, 0):
        sizes = point.signature(kernels.flash_attention).sizes
        assert sizes["i"] == sizes["j"] == 277
        assert sizes["hk"] == sizes["g"] == 2
        assert point.forward["block_i"] == 128


def test_integers_point_into_what_is_there() -> None:
    (point, *_) = strategies.rich(statistics, 0)
    _, label = Case(point=point, seed=5).inputs(statistics)
    assert label.dtype == np.int32
    assert label.min() >= 0
    assert 1 < label.max() < point.sizes["d"]
    signature = gathered.workload_signature(Workload("w", t=3, p=20, d=128))
    assert strategies.index_bound(gathered.declaration, signature, "page") == 3
    assert strategies.index_bound(gathered.declaration, signature, "table") is None


def test_a_case_is_its_seed() -> None:
    (point, *_) = strategies.rich(kernels.swiglu, 0)
    one, same, other = (Case(point=point, seed=seed).inputs(kernels.swiglu) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert not np.array_equal(one[0], one[1])
    huge = Case(point=point, kinds=strategies.FrozenMapping({"up": "huge"}), seed=1).inputs(kernels.swiglu)
    assert np.array_equal(one[0], huge[0])
    assert np.abs(huge[1].astype(np.float64)).min() > 1e12


def test_drawn_cases_use_every_class_and_every_point() -> None:
    points = [p for p in strategies.points(kernels.rms_norm, 5, 0) if not p.empty]
    seen: set[str] = set()
    where = set()

    @settings(max_examples=300, database=None, deadline=None)
    @given(case=strategies.cases(kernels.rms_norm, points))
    def draw(case: Case) -> None:
        seen.update(case.kinds.values())
        where.add(case.point)
        assert set(case.kinds) <= {"x", "w", "dy"}

    draw()
    assert seen == {"huge", "tiny", "subnormal", "constant", "nan", "inf", "cancellation", "sorted", "one_hot"}
    assert where == set(points)


def test_dims_that_split_a_call() -> None:
    assert strategies.batch_dims(kernels.flash_attention) == ("b", "hk", "g", "i")
    assert strategies.batch_dims(kernels.rms_norm) == ("r",)
    assert strategies.batch_dims(kernels.matmul) == ("m", "n")
    assert strategies.batch_dims(carried) == ("b", "i")


def test_configs_never_change_what_an_accumulator_lasts_over() -> None:
    signature = carried.workload_signature(Workload("w", b=2, i=20, j=300))
    for seed in range(20):
        config = strategies.drawn_config(carried, signature, "drawn", np.random.default_rng(seed))
        order = str(config.get("order", "b i j")).split()
        assert order.index("i") > order.index("b")
