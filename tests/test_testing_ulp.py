"""The error metric."""

import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from tpukern.testing import judging
from tpukern.testing.ulp import Error, amplification, worst

F32_EPS = 2.0**-23
BF16_EPS = 2.0**-7


def test_one_ulp_of_float32():
    want = np.array([1.0, 1.5, -1.9])
    got = np.float32(want)
    got[1] += np.float32(F32_EPS)
    error = worst(got, want, sensitivity=np.abs(want))
    assert error.index == (1,)
    assert error.ulps == pytest.approx(1 / 1.5 / 2, rel=1e-6)  # over m (eps + sqrt(1) eps)
    assert worst(want.astype(np.float32), want.astype(np.float32).astype(np.float64)).ulps == 0


def test_bfloat16_hardly_feels_the_length_of_the_sum_and_float32_does():
    want = np.ones(4)
    bf16 = np.full(4, 1 + BF16_EPS).astype(ml_dtypes.bfloat16)
    f32 = np.full(4, 1 + F32_EPS).astype(np.float32)
    assert worst(bf16, want, reduction=4096).ulps == pytest.approx(1, rel=0.01)
    assert worst(f32, want, reduction=4096).ulps == pytest.approx(1 / 65)
    assert worst(f32, want, reduction=1).ulps == pytest.approx(1 / 2)


def test_cancellation_is_measured_by_what_was_summed():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 512)).astype(np.float32)
    x = np.concatenate([x, -x], axis=1)
    w = np.repeat(rng.standard_normal((512, 3)), 2, axis=0).astype(np.float32)
    w = np.concatenate([w[::2], w[::2]], axis=0)
    want = x.astype(np.float64) @ w.astype(np.float64)
    got = (x @ w).astype(np.float32)
    got = got + np.float32(1e-6)
    summed = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64)
    assert worst(got, want).ulps > 1e6
    assert worst(got, want, reduction=1024, sensitivity=summed).ulps < 1


def test_without_a_sensitivity_the_row_sets_the_scale():
    want = np.array([[1000.0, 0.0], [1.0, 0.0]])
    got = want.astype(np.float32)
    got[:, 1] = 2e-4
    error = worst(got, want)
    assert error.index == (1, 1)
    assert error.ulps == pytest.approx(2e-4 / (2 * F32_EPS), rel=1e-5)


def test_a_sensitivity_is_no_excuse_for_its_neighbour():
    want = np.array([1e6, 1.0])
    got = np.float32([1e6, 1.01])
    assert worst(got, want).ulps < 0.1
    assert worst(got, want, sensitivity=np.abs(want)).ulps > 1e4


def test_subnormals_may_be_flushed():
    want = np.array([1e-40, -1e-39])
    assert worst(np.zeros(2, np.float32), want).ulps < 1
    assert worst(np.float32([1e-37, 0]), want).ulps > 5


def test_a_flushed_intermediate_may_be_amplified():
    operands = [np.float32([-90, 1, np.inf]), np.float32([1000]), np.int32([5]), np.zeros((0, 2), np.float32)]
    assert amplification(operands) == 90_000
    want = np.array([1e-34, 1.0])
    got = np.float32([0, 1])
    assert worst(got, want, sensitivity=want).ulps > 1e3
    assert worst(got, want, sensitivity=want, amplified=90_000).ulps < 1
    assert worst(np.float32([0, 1.01]), want, sensitivity=want, amplified=90_000).ulps > 1e4


@pytest.mark.parametrize(
    ("got", "want"),
    [(np.nan, 1.0), (1.0, np.nan), (np.inf, np.nan), (np.inf, -np.inf), (1.0, np.inf), (np.nan, np.inf), (3e38, np.inf)],
)
def test_nan_and_inf_must_agree(got, want):
    error = worst(np.float32([1, got]), np.array([1, want]))
    assert (error.ulps, error.index, error.wrong_kind) == (math.inf, (1,), 1)


def test_nan_and_inf_that_agree():
    special = np.array([np.nan, np.inf, -np.inf, 1.0])
    error = worst(special.astype(ml_dtypes.bfloat16), special)
    assert (error.ulps, error.wrong_kind) == (0, 0)
    assert worst(np.float32([np.inf, 1.1]), np.array([np.inf, 1.0]), reduction=1).ulps > 1e5


def test_overflow_is_an_error_of_units_near_the_threshold_only():
    largest = float(np.finfo(np.float32).max)
    assert worst(np.float32([np.inf]), np.array([largest])).ulps < 1
    assert worst(np.float32([largest]), np.array([largest * 1.5])).ulps < 1
    assert worst(np.float32([np.inf]), np.array([1e300])).ulps == 0
    assert worst(np.float32([np.inf]), np.array([1e38])).ulps > 1e6
    assert worst(np.float32([-np.inf]), np.array([1e300])).ulps > 1e6


def test_integers_are_exact():
    assert worst(np.int32([1, 2]), np.array([1, 2])).ulps == 0
    error = worst(np.int32([1, 3]), np.array([1, 2]))
    assert (error.ulps, error.index, error.got, error.want) == (math.inf, (1,), 3, 2)


def test_empty_scalar_and_shapes():
    assert worst(np.zeros((0, 3), np.float32), np.zeros((0, 3))) == Error(ulps=0.0)
    assert worst(np.float32(1), np.float64(1)).index == ()
    with pytest.raises(ValueError, match=r"^got has shape \(2,\), want \(3,\); expected one shape$"):
        worst(np.zeros(2, np.float32), np.zeros(3))


def test_text():
    error = worst(np.float32([[1, np.nan]]), np.array([[1.0, 2.0]]))
    assert str(error) == "inf ulp at [0, 1]: got nan, want 2 (1 elements disagree in NaN or Inf)"


def test_a_bound_by_result_and_dtype_comes_before_one_by_either():
    by = judging.bounds(SimpleNamespace(tolerance={"float32": 28, "bfloat16": 4, "o": 3, "o float32": 8}))
    found = [by.of(SimpleNamespace(name=name, dtype=dtype)) for name in "od" for dtype in ("float32", "bfloat16", "int8")]
    assert found == [8, 3, 3, 28, 4, 16]
