"""The classes of input values."""

import ml_dtypes
import numpy as np
import pytest

from tpukern.testing.values import KINDS, kinds, values

FLOATS = ["float32", "bfloat16", "float16", "float8_e5m2"]


@pytest.mark.parametrize("dtype", [*FLOATS, "float8_e4m3fn", "int8", "int32", "uint8", "bool"])
def test_every_class_fills_every_shape_and_is_seeded(dtype):
    for kind in kinds(dtype):
        for shape in [(), (1,), (0, 3), (3, 0), (5, 7), (2, 3, 8)]:
            array = values(kind, shape, dtype, seed=3)
            assert array.shape == shape
            assert array.dtype.name == dtype
            assert array.tobytes() == values(kind, shape, dtype, seed=3).tobytes()
        if kind not in ("constant", "one_hot") and dtype != "bool":
            assert values(kind, (4, 64), dtype, 1).tobytes() != values(kind, (4, 64), dtype, 2).tobytes(), kind


@pytest.mark.parametrize("dtype", FLOATS)
def test_magnitudes(dtype):
    info = ml_dtypes.finfo(dtype if dtype == "float16" else getattr(ml_dtypes, dtype, np.float32))
    huge, tiny, subnormal, normal = (
        np.abs(values(k, (64, 64), dtype, 5).astype(np.float64)) for k in ("huge", "tiny", "subnormal", "normal")
    )
    assert 2.0 ** (int(info.maxexp) // 3) <= huge.max() < np.sqrt(float(info.max))
    assert float(info.smallest_normal) < tiny.min() <= tiny.max() < 2.0 ** (int(info.minexp) / 4)
    assert 0 < subnormal.min() <= subnormal.max() < float(info.smallest_normal)
    assert 0.5 < normal.mean() < 1.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_cancellation_sums_to_zero_but_its_terms_do_not(dtype, n):
    rows = values("cancellation", (3, n), dtype, 1).astype(np.float64)
    assert np.array_equal(rows.sum(-1), np.zeros(3))
    assert n == 1 or np.abs(rows).sum() > 1


def test_shapes_of_the_other_classes():
    assert len(np.unique(values("constant", (4, 9), "float32", 1))) == 1
    rows = values("one_hot", (6, 9), "bfloat16", 1).astype(np.float32)
    assert (rows.sum(-1) == 1).all()
    assert ((rows == 0) | (rows == 1)).all()
    assert (np.diff(values("sorted", (4, 50), "float32", 1), axis=-1) >= 0).all()
    nans = np.isnan(values("nan", (8, 8), "bfloat16", 1).astype(np.float32))
    infs = values("inf", (32, 8), "float32", 1)
    assert nans.sum() == 4
    assert not nans.all()
    assert np.isposinf(infs).any()
    assert np.isneginf(infs).any()
    assert np.isnan(values("nan", (), "float32"))


def test_a_dtype_without_such_values():
    assert "inf" not in kinds("float8_e4m3fn")
    assert "nan" in kinds("float8_e4m3fn")
    assert set(kinds("float32")) == set(KINDS)
    with pytest.raises(ValueError, match=r"^int32 has no 'nan' values; expected one of"):
        values("nan", (2,), "int32")
    with pytest.raises(ValueError, match=r"^no value class 'big'; expected one of \['normal', 'huge'"):
        values("big", (2,), "float32")


def test_huge_integers_are_at_the_limits():
    array = values("huge", (64,), "int8", 0)
    assert set(np.sign(array.astype(int))) == {-1, 1}
    assert np.abs(array.astype(int)).min() >= 119
    assert values("huge", (64,), "uint8", 0).min() >= 247
