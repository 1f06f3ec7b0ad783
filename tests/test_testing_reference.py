"""References: exact, in the kernel's own dtype, differentiated; and how sensitive they are."""

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from tpukern.dsl import F32, In, Out, Ref, kernel
from tpukern.errors import ParityError
from tpukern.kernels import flash_attention, rms_norm, swiglu
from tpukern.testing import reference
from tpukern.testing.ulp import worst
from tpukern.testing.values import values


def with_reference(function):
    @kernel(reference=function)
    def square(x: Ref = In("n d"), y: Ref = Out("n d"), s: Ref = Out("n 1", "float32", saved=True)) -> None:
        y[...] = (x[...].astype(F32) ** 2).astype(y.dtype)
        s[...] = x[..., :1].astype(F32)

    return square


X = values("normal", (4, 6), "float32", 0)


def fails(function, inputs=(X,)):
    square = with_reference(function)
    with pytest.raises(ParityError) as raised:
        reference.outputs(square, square.signature(*inputs), inputs)
    return str(raised.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_exact_and_in_their_own_dtype(dtype):
    x, w = values("normal", (3, 5, 40), dtype, 0), values("normal", (40,), dtype, 1)
    signature = rms_norm.signature(x, w, eps=1e-3)
    exact = reference.outputs(rms_norm, signature, (x, w))
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * w.astype(np.float64)
    assert list(exact) == ["y"]
    assert exact["y"].dtype == np.float64
    assert np.allclose(exact["y"], want, rtol=1e-14)
    own = reference.outputs(rms_norm, signature, (x, w), exact=False)["y"]
    assert own.dtype.name == dtype
    assert 0 < np.abs(own.astype(np.float64) - want).max() < 8 * float(ml_dtypes.finfo(own.dtype).eps)


def test_subnormal_operands_count_as_zero():
    x = np.float32([[1e-40, 1e-37, -1e-39, 1]])
    square = with_reference(lambda x: x * 1e6)
    exact = reference.outputs(square, square.signature(x), (x,))["y"]
    assert np.allclose(exact, [[0, 1e-31, 0, 1e6]], rtol=1e-6, atol=0)
    assert reference.outputs(square, square.signature(x), (x,), exact=False)["y"][0, 0] > 0


def test_tensors_of_any_stride_are_taken():
    base = torch.arange(48, dtype=torch.bfloat16).reshape(6, 8)
    x = base.t()[1:, ::2]
    square = with_reference(lambda x: x * x)
    got = reference.outputs(square, square.signature(x), (x,))
    assert np.array_equal(got["y"], x.double().numpy() ** 2)


def test_all_outputs_with_the_saved_ones():
    square = with_reference(lambda x: (x * x, x[:, :1]))
    got = reference.outputs(square, square.signature(X), (X,))
    assert list(got) == ["y", "s"]


def test_gradients():
    gate, up = values("normal", (5, 7), "float32", 0), values("normal", (5, 7), "float32", 1)
    dy = values("normal", (5, 7), "float32", 2)
    got = reference.gradients(swiglu, swiglu.signature(gate, up), (gate, up), {"y": dy})
    g = gate.astype(np.float64)
    sigmoid = 1 / (1 + np.exp(-g))
    assert list(got) == ["dgate", "dup"]
    assert np.allclose(got["dup"], dy * g * sigmoid, rtol=1e-14)
    assert np.allclose(got["dgate"], dy * up.astype(np.float64) * sigmoid * (1 + g * (1 - sigmoid)), rtol=1e-12)
    own = reference.gradients(swiglu, swiglu.signature(gate, up), (gate, up), {"y": dy}, exact=False)
    assert own["dup"].dtype == np.float32


def test_gradient_of_an_operand_that_does_not_matter_is_zero():
    square = with_reference(lambda x: x[:, :1] * torch.ones(1, 6, dtype=x.dtype))
    got = reference.gradients(square, square.signature(X), (X,), {"y": np.ones_like(X)})
    assert np.array_equal(got["dx"], np.where(np.arange(6) == 0, 6.0, 0.0) * np.ones((4, 1)))


def test_the_reference_of_attention_takes_every_form():
    q, k, v = (values("normal", s, "bfloat16", i) for i, s in enumerate([(1, 4, 5, 8), (1, 2, 7, 8), (1, 2, 7, 16)]))
    signature = flash_attention.signature(q, k, v, causal=False)
    assert reference.outputs(flash_attention, signature, (q, k, v))["o"].shape == (1, 4, 5, 16)


def test_errors():
    assert fails(None) == "square[parity]: it has no reference. Give the decorator reference=: the same in plain torch."
    assert fails(lambda x: x[:2]) == (
        "square[parity]: its reference gives y of shape (2, 6); expected (4, 6), as the signature says."
    )
    assert fails(lambda x: (x, x, x)) == ("square[parity]: its reference gives 3 results; expected 1 or 2: y: float32[4,6].")

    def imports(x):
        import no_such_package  # noqa: F401

    assert fails(imports) == (
        "square[parity]: its reference needs the package 'no_such_package'. Run: pip install no_such_package."
    )
    text = fails(lambda x: x @ x)
    assert text.startswith("square[parity]: its reference fails in float64 on x: float32[4,6]: mat1 and mat2")
    assert text.endswith("; expected a reference that takes every call the signature allows.")
    square = with_reference(lambda x: x.detach() * 2)
    with pytest.raises(ParityError) as raised:
        reference.gradients(square, square.signature(X), (X,), {"y": X})
    assert str(raised.value) == (
        "square[parity]: the results of its reference have no gradient; expected torch operations throughout."
    )


def test_sensitivity_of_a_dot_product_is_what_it_sums():
    x, w = values("cancellation", (64, 512), "float32", 0), np.ones((512, 32), np.float32)

    def product(operands):
        return {"y": operands[0] @ operands[1]}

    moved = reference.sensitivity(product, (x, w))["y"]
    want = np.sqrt(2 * (x.astype(np.float64) ** 2) @ (w**2))
    assert np.abs(x.astype(np.float64) @ w).max() == 0
    assert 0.85 < (moved / want).mean() < 1.05
    assert (moved / want).min() > 0.2
    assert np.array_equal(moved, reference.sensitivity(product, (x, w))["y"])
    error = worst((x @ w).astype(np.float32), product((x.astype(np.float64), w))["y"], reduction=512, sensitivity=moved)
    assert error.ulps < 2


def test_sensitivity_of_a_result_that_is_always_zero():
    q, k, v = (values("normal", (1, 1, 1, 8), "float32", i) for i in range(3))
    do = values("normal", (1, 1, 1, 8), "float32", 3)
    signature = flash_attention.signature(q, k, v, causal=True)

    def differentiate(operands):
        return reference.gradients(flash_attention, signature, operands[:3], {"o": operands[3]})

    moved, want = reference.sensitivity(differentiate, (q, k, v, do)), differentiate((q, k, v, do))
    assert np.abs(want["dq"]).max() < 1e-14  # softmax over one key
    size = float(np.abs(do * v).sum())  # what cancels in dp - delta
    assert 0.1 * size * np.abs(k).max() * 8**-0.5 < np.abs(moved["dq"]).max() < 10 * size * np.abs(k).max()


def test_noise_reaches_intermediate_results_and_leaves_views_alone():
    square = with_reference(lambda x: ((x + 1) - 1)[:, :].reshape(x.shape).add_(0))
    signature = square.signature(X)
    small = (X * 1e-6).astype(np.float32)
    moved = reference.sensitivity(lambda o: reference.outputs(square, signature, o), (small,))["y"]
    assert 0.5 < moved.mean() < 2  # of the size of the 1, not of x


def test_sensitivity_leaves_integers_and_specials_alone():
    table, x = np.array([2, 0], np.int32), np.float32([1, np.inf, np.nan])

    def gather(operands):
        assert operands[0].dtype == np.int32
        return {"y": operands[1][operands[0]], "z": operands[1] * 1}

    moved = reference.sensitivity(gather, (table, x))
    assert np.array_equal(moved["y"] > 0, [False, True])
    assert np.array_equal(moved["z"] > 0, [True, False, False])
    only = reference.sensitivity(lambda operands: {"y": operands[0].astype(np.float64)}, (table,))
    assert np.array_equal(only["y"], [0, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_parts_together_judge_a_kernel(dtype):
    x, w = values("cancellation", (19, 40), dtype, 0), values("normal", (40,), dtype, 1)
    signature = rms_norm.signature(x, w)
    bound = rms_norm.bind_signature(signature, {"block_r": 8})
    got = np.asarray(jax.jit(bound.function)(x, w)[0])
    want = reference.outputs(rms_norm, signature, (x, w))["y"]
    scale = reference.sensitivity(lambda operands: reference.outputs(rms_norm, signature, operands), (x, w))["y"]
    assert worst(got, want, reduction=40, sensitivity=scale).ulps < 1
    assert worst(got + got * got.dtype.type(0.05), want, reduction=40, sensitivity=scale).ulps > 3
