"""Every shipped kernel against its reference in float64: shapes from its declaration, statics from its workloads.

Plain interpret form pads with NaN what lies past the end of an array, so a block that is read too far shows. The TPU
interpreter also poisons scratch and output windows before they are written, and reports races.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tpukern import kernels
from tpukern.dsl import Kernel, Signature, Workload, using
from tpukern.testing.semantics import simulate

KERNELS: list[Kernel] = [k for name in kernels.__all__ if (k := getattr(kernels, name)).frontend == "pallas"]
DTYPES = ("float32", "bfloat16")
WHOLE = (40, 128, 1, 80)  # sizes of dims that are never cut into blocks
BORDERS, ALIGNED, TAILS = range(5), 5, 6


def sizes_of(kernel: Kernel, turn: int) -> dict[str, int]:
    """Returns sizes round the borders of the smallest blocks, so that every dim meets every border in five turns.

    One, just below a block, a block, just above it, several blocks with a tail. At the turn `ALIGNED` all dims have whole
    blocks, at `TAILS` all have several blocks and a tail.
    """
    k = kernel.declaration
    sizes = {}
    for n, name in enumerate(dict.fromkeys(name for o in k.inputs for name in o.names)):
        if turn == ALIGNED:
            sizes[name] = 2 * min(k.dims[name].choices) if name in k.blocks else 1 if name in k.dims else 128
        elif name not in k.dims:
            sizes[name] = WHOLE[0 if turn == TAILS else (turn + n) % len(WHOLE)]
        elif k.dims[name].each:
            sizes[name] = 2 if turn == TAILS else 1 + (turn + n) % 2
        else:
            block = min(k.dims[name].choices)
            sizes[name] = (1, block - 1, block, block + 1, 2 * block + 37)[4 if turn == TAILS else (turn + n) % 5]
    return sizes


def statics_of(kernel: Kernel) -> list[dict[str, Any]]:
    """Returns the defaults of the static arguments, and what the workloads say."""
    names = kernel.declaration.statics
    used = ({name: value for name, value in w.values.items() if name in names} for w in kernel.workloads)
    return [dict(items) for items in dict.fromkeys(tuple(sorted(statics.items())) for statics in ({}, *used))]


def cases() -> Iterator[Any]:
    """Yields all borders at the default statics, fewer at the others, and one case in bfloat16: indexing knows no types."""
    for kernel in KERNELS:
        for n, statics in enumerate(statics_of(kernel)):
            turns = (*BORDERS, ALIGNED) if n == 0 else (1, 3)
            for dtype, turn in (*(("float32", turn) for turn in turns), ("bfloat16", TAILS)):
                values = {**sizes_of(kernel, turn), **statics}
                shown = ",".join(f"{name}={value}" for name, value in values.items())
                yield pytest.param(kernel, Workload("case", dtype=dtype, **values), id=f"{kernel.name}-{dtype}-{shown}")


def random_array(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> jax.Array:
    """Returns numbers of either sign and of size 1/2 to 3/2: a row of one element is as well conditioned as a long one."""
    return jnp.asarray(rng.uniform(0.5, 1.5, shape) * rng.choice([-1.0, 1.0], shape), dtype)


def as_float64(array: jax.Array) -> torch.Tensor:
    return torch.tensor(np.asarray(array, np.float64), requires_grad=True)


def small_blocks(kernel: Kernel, signature: Signature, larger: int | None = None) -> dict[str, dict[str, int]]:
    """Returns configs that cut a kernel and its gradient into as many steps as can be.

    With `larger`, every second dim has the next larger block: the odd ones or the even ones.
    """

    def blocks_of(k: Kernel, of: Signature) -> dict[str, int]:
        if not k.is_tile:
            called = [call.kernel for call in k.calls((of,))]
            return {f"{inner.name}.{key}": value for inner in called for key, value in blocks_of(inner, of).items()}
        choices = [(f"block_{name}", sorted(k.declaration.dims[name].choices)) for name in k.declaration.blocks]
        return {key: some[larger is not None and n % 2 == larger] for n, (key, some) in enumerate(choices)}

    assert kernel.gradient is not None
    backward = kernel.gradient_signature(signature)
    return {kernel.name: blocks_of(kernel, signature), kernel.gradient.name: blocks_of(kernel.gradient, backward)}


def differentiated(kernel: Kernel, inputs: list[jax.Array], statics: dict[str, Any]) -> tuple[jax.Array, Any]:
    """Returns the kernel's first output and its pullback."""

    def first(*arrays: jax.Array) -> jax.Array:
        outputs = kernel(*arrays, **statics)
        return outputs[0] if isinstance(outputs, tuple) else outputs

    return jax.vjp(first, *inputs)


def worst_ulps(got: jax.Array, want: torch.Tensor, at_least: float) -> float:
    """Returns the largest error in ULPs, at the largest wanted value or `at_least`, whatever is more."""
    exact = want.detach().numpy()
    assert got.shape == exact.shape
    error = np.abs(np.asarray(got, np.float64) - exact)
    assert not np.isnan(error).any(), "NaN: something read past the end of its data"
    return float(error.max() / max(np.abs(exact).max(), at_least) / float(jnp.finfo(got.dtype).eps))


def check(kernel: Kernel, signature: Signature) -> None:
    """Compares output and gradients with the reference in float64, within the kernel's tolerance.

    A gradient's error is measured at the gradient's size, or the cotangent's where all terms of the gradient cancel.
    """
    rng = np.random.default_rng(0)
    statics = dict(signature.statics)
    tolerance = kernel.tolerance[signature.dtype]
    if signature.dtype == "float32":  # a unit grows with the root of what is summed: see tpukern.testing.ulp
        tolerance *= 1 + max(signature.sizes.values()) ** 0.5
    inputs = [random_array(o.shape, o.dtype, rng) for o in signature.inputs]
    y, pullback = differentiated(kernel, inputs, statics)
    dy = random_array(y.shape, str(y.dtype), rng)
    exact = [as_float64(array) for array in inputs]
    assert kernel.reference is not None
    want = kernel.reference(*exact, **statics)
    assert worst_ulps(y, want, 1e-30) <= tolerance
    wanted = torch.autograd.grad(want, exact, as_float64(dy))
    for o, got, gradient in zip(signature.inputs, pullback(dy), wanted, strict=True):
        assert got.dtype == o.dtype
        assert worst_ulps(got, gradient, 1.5) <= tolerance, f"d{o.name}"


@pytest.mark.parametrize(("kernel", "workload"), list(cases()))
def test_smallest_blocks_agree_with_the_reference(kernel: Kernel, workload: Workload) -> None:
    signature = kernel.workload_signature(workload)
    with using(configs=small_blocks(kernel, signature)):
        check(kernel, signature)


@pytest.mark.parametrize("larger", [0, 1])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if len(k.declaration.blocks) > 1], ids=lambda k: k.name)
def test_unequal_blocks_agree_with_the_reference(kernel: Kernel, larger: int) -> None:
    """A span that only holds where blocks of queries and keys begin together shows here."""
    statics = statics_of(kernel)[-1]
    signature = kernel.workload_signature(Workload("case", dtype="float32", **sizes_of(kernel, TAILS), **statics))
    with using(configs=small_blocks(kernel, signature, larger)):
        check(kernel, signature)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_default_blocks_agree_with_the_reference(kernel: Kernel) -> None:
    for dtype, statics in zip(DTYPES, (statics_of(kernel)[0], statics_of(kernel)[-1]), strict=True):
        check(kernel, kernel.workload_signature(Workload("case", dtype=dtype, **sizes_of(kernel, TAILS), **statics)))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_leading_axes_of_other_ranks(kernel: Kernel) -> None:
    """Two leading axes and none give what one gives."""
    star = next(o.axes[0] for o in kernel.declaration.inputs if getattr(o.axes[0], "leading", False))
    sizes, statics = sizes_of(kernel, TAILS), statics_of(kernel)[-1]
    for leading in ((2, 3), ()):
        check(kernel, kernel.workload_signature(Workload("case", dtype="float32", **{**sizes, star.name: leading}, **statics)))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_zero_rows(kernel: Kernel) -> None:
    """Without rows the output is empty, and gradients of what all rows share are zero."""
    star = next(o.axes[0] for o in kernel.declaration.inputs if getattr(o.axes[0], "leading", False))
    sizes = {**sizes_of(kernel, TAILS), star.name: 0}
    if not all(star.name in o.names for o in kernel.declaration.outputs):
        pytest.skip(f"{star.name} is what {kernel.name} sums over")
    signature = kernel.workload_signature(Workload("case", **sizes))
    inputs = [random_array(o.shape, o.dtype, np.random.default_rng(0)) for o in signature.inputs]
    y, pullback = differentiated(kernel, inputs, {})
    assert y.size == 0
    for o, gradient in zip(signature.inputs, pullback(jnp.zeros(y.shape, y.dtype)), strict=True):
        assert gradient.shape == o.shape
        assert gradient.dtype == o.dtype
        assert not gradient.any()


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_tpu_interpreter_finds_nothing(kernel: Kernel, direction: str) -> None:
    """Under the TPU's memory semantics nothing reads what was not written, reads too far, or races with another step."""
    signature = kernel.workload_signature(
        Workload("case", dtype="float32", **sizes_of(kernel, TAILS), **statics_of(kernel)[-1])
    )
    one, rng = kernel.directions[direction], np.random.default_rng(0)
    wanted = signature if direction == "forward" else kernel.gradient_signature(signature)
    bound = one.bind_signature(wanted, small_blocks(kernel, signature)[one.name])
    report = simulate(bound.function, *(random_array(o.shape, o.dtype, rng) for o in bound.signature.inputs))
    assert report.ok, report.findings
    assert report.steps > 4
