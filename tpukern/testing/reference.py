"""What a kernel should have computed: its torch reference, evaluated exactly, in its own dtype, and differentiated.

Exactly means in float64, on the very numbers that the kernel gets: every float operand converts to float64 without loss.
Float32 subnormals among them count as zero, as they do for the TPU and for XLA on CPU. In its own dtype means what ATen on
CPU computes from the same tensors.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tpukern.errors import ParityError
from tpukern.testing.values import dtype_named

if TYPE_CHECKING:
    from tpukern.dsl import Kernel
    from tpukern.dsl.signature import Operand, Signature

Arrays = dict[str, np.ndarray]


def outputs(kernel: "Kernel", signature: "Signature", inputs: Sequence[Any], *, exact: bool = True) -> Arrays:
    """Evaluates the reference.

    Args:
        kernel: A kernel with a reference.
        signature: The call's.
        inputs: NumPy arrays or CPU tensors, as the kernel gets them.
        exact: In float64; False: in the operands' own dtypes.

    Returns:
        The outputs that the reference gives, by name: all of them, or all that are not saved for the backward pass. Float64
        if exact; bfloat16 and 8-bit floats are ml_dtypes.

    Raises:
        ParityError: There is no reference, it needs a package that is not there, or its results do not fit the signature.
    """
    tensors = [tensor(a, exact) for a in inputs]
    return {name: array(t) for name, t in _run(kernel, signature, tensors, exact).items()}


def gradients(
    kernel: "Kernel",
    signature: "Signature",
    inputs: Sequence[Any],
    cotangents: Mapping[str, Any],
    *,
    exact: bool = True,
    with_outputs: bool = False,
) -> Arrays:
    """Differentiates the reference with autograd.

    Args:
        kernel: A kernel with a reference.
        signature: The forward call's.
        inputs: As for `outputs`.
        cotangents: One for each output that is not saved, under the output's name.
        exact: As for `outputs`.
        with_outputs: Return the outputs too: one evaluation for both.

    Returns:
        `d<input>` for every floating-point input; zeros where the outputs do not depend on it.

    Raises:
        ParityError: As for `outputs`, or the reference cannot be differentiated.
    """
    import torch

    tensors = [tensor(a, exact) for a in inputs]
    leaves = {o.name: t.requires_grad_() for o, t in zip(signature.inputs, tensors, strict=True) if t.is_floating_point()}
    with torch.enable_grad():
        results = _run(kernel, signature, tensors, exact)
        wanted = {name: results[name] for name in results if name in cotangents}
        if not wanted or not all(t.requires_grad for t in wanted.values()):
            raise ParityError(kernel.name, "the results of its reference have no gradient", "torch operations throughout")
        given = [tensor(cotangents[name], exact) for name in wanted]
        found = torch.autograd.grad(list(wanted.values()), list(leaves.values()), given, allow_unused=True)
    pairs = zip(leaves.items(), found, strict=True)
    given_back = {name: array(t) for name, t in results.items()} if with_outputs else {}
    return {**given_back, **{f"d{name}": array(torch.zeros_like(leaf) if g is None else g) for (name, leaf), g in pairs}}


def sensitivity(
    evaluate: Callable[[list[np.ndarray]], Arrays], operands: Sequence[Any], seed: int | Sequence[int] = 0, *, trials: int = 8
) -> Arrays:
    """Measures how far exact results move when everything is rounded: the scale of `ulp.worst`.

    In each trial every element of every floating-point operand changes by one eps of its dtype, and every intermediate
    result of the torch operations that `evaluate` runs (backward too) by one eps of float32, up or down at random: Monte
    Carlo arithmetic (Parker, 1997). An operation that ATen has a formula for in simpler ones counts as that (1 + erf of
    gelu cancels); a sum moves by the eps of what it adds up. Of an operation with several results the first changes by the
    operands' eps: that one is stored in their type between forward and backward (attention's output), the others are
    float32 statistics. The intermediates matter where results are exactly 0 for all operands, like the gradient of a softmax
    over one element, but the terms that cancel are rounded.

    Args:
        evaluate: From operands (float64 where they were floats) to exact results.
        operands: Arrays in the dtypes that the kernel gets.
        seed: Seed of the signs.
        trials: How often to try. Few are noisy: of eight, one in a thousand sees a third of the movement.

    Returns:
        For each result, the root mean square over the trials of |change|, in units of the largest eps among the operands:
        for a sum of products of one dtype, sqrt(2 * sum of their squares). Inf where rounding makes a finite result NaN or Inf,
        zero where it is not finite anyway.
    """
    rng = np.random.default_rng(seed)
    given = [array(a) for a in operands]
    steps = [_eps(a) for a in given]
    largest = max(steps, default=0.0)
    wide = [a.astype(np.float64) if step else a for a, step in zip(given, steps, strict=True)]
    base = evaluate(wide)
    total = {name: np.zeros(result.shape) for name, result in base.items()}
    if not largest:
        return total
    with np.errstate(all="ignore"):
        for _ in range(trials):
            moved = [
                a * (1 + step * rng.choice((-1.0, 1.0), a.shape)) if step else a for a, step in zip(wide, steps, strict=True)
            ]
            with _noise(largest, int(rng.integers(2**62))):
                results = evaluate(moved)
            for name, result in results.items():
                change = (result - base[name]) / largest
                lost = np.isfinite(base[name]) & ~np.isfinite(result)
                total[name] += np.where(np.isfinite(change), change, np.where(lost, np.inf, 0.0)) ** 2
        return {name: np.sqrt(t / trials) for name, t in total.items()}


def _noise(stored: float, seed: int) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which float64 results of torch operations move up or down at random.

    By eps(float32); the first of several results by `stored`.
    """
    import torch
    from torch._decomp import decomposition_table as decompositions
    from torch.utils._python_dispatch import TorchDispatchMode

    generator, computed = torch.Generator().manual_seed(seed), float(np.finfo(np.float32).eps)

    def changed(value: Any, step: float, size: Any = None) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float64:
            return value
        signs = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8)
        return value + (value if size is None else size) * (2 * step * signs - step)

    def summed(func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the root of the sum of squares of what a sum adds up: its rounding is theirs. None for other functions."""
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm") and args[0].dtype == torch.float64:
            return func(args[0] * args[0], args[1] * args[1]).sqrt_()
        if name == "sum" and args[0].dtype == torch.float64:
            return func(args[0] * args[0], *args[1:], **kwargs).sqrt_()
        return None

    class Noise(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in decompositions and len(func._schema.returns) == 1:  # gelu is more than one rounding
                with self, contextlib.suppress(NotImplementedError):
                    parts = decompositions[func](*args, **(kwargs or {}))
                    if parts is not NotImplemented:
                        return parts
            results = func(*args, **(kwargs or {}))
            if any(r.alias_info is not None for r in func._schema.returns):
                return results  # a view, or written in place
            if not isinstance(results, tuple | list):
                return changed(results, computed, summed(func, args, kwargs or {}))
            return type(results)(changed(r, computed if i else stored) for i, r in enumerate(results))

    return Noise()


def array(value: Any) -> np.ndarray:
    """Returns a tensor or array as a NumPy array of the same dtype and values."""
    if isinstance(value, np.ndarray):
        return value
    if not hasattr(value, "detach"):
        return np.asarray(value)
    import torch

    plain = value.detach().cpu()
    name = str(plain.dtype).removeprefix("torch.")
    if hasattr(ml_dtypes, name):  # NumPy itself has no such dtype; float32 holds every value of it
        return plain.to(torch.float32).numpy().astype(dtype_named(name))
    return plain.numpy()


def tensor(value: Any, exact: bool) -> Any:
    """Returns an array as a CPU tensor: float64 if exact and a float, else of its own dtype."""
    import torch

    plain = array(value)
    if not _eps(plain):
        return torch.from_numpy(np.array(plain))
    wide = plain.astype(np.float64)
    if exact:
        return torch.from_numpy(np.where(np.abs(wide) < float(np.finfo(np.float32).tiny), 0.0, wide))
    return torch.from_numpy(wide).to(getattr(torch, plain.dtype.name))


def _eps(plain: np.ndarray) -> float:
    """Returns the eps of a float array's dtype; 0 for integers and bools."""
    try:
        return float(ml_dtypes.finfo(plain.dtype).eps)
    except ValueError:
        return 0.0


def _run(kernel: "Kernel", signature: "Signature", tensors: Sequence[Any], exact: bool) -> dict[str, Any]:
    if kernel.reference is None:
        raise ParityError(kernel.name, "it has no reference", do="Give the decorator reference=: the same in plain torch.")
    try:
        results = kernel.reference(*tensors, **signature.statics)
    except ImportError as error:
        found = f"its reference needs the package {error.name!r}" if error.name else f"its reference cannot import: {error}"
        raise ParityError(kernel.name, found, do=f"Run: pip install {error.name}." if error.name else "") from error
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        where = "in float64" if exact else f"in {signature.dtype}"
        raise ParityError(
            kernel.name,
            f"its reference fails {where} on {', '.join(map(str, signature.inputs))}: {error}",
            "a reference that takes every call the signature allows",
        ) from error
    return _named(kernel.name, signature, results if isinstance(results, tuple | list) else (results,))


def _named(name: str, signature: "Signature", results: Sequence[Any]) -> dict[str, Any]:
    """Pairs results with the outputs of a signature.

    Raises:
        ParityError: They are too many or too few, or a shape differs.
    """
    unsaved = [o for o in signature.outputs if o.name not in signature.saved]
    declared: Sequence[Operand] = signature.outputs if len(results) == len(signature.outputs) else unsaved
    if len(results) != len(declared):
        counts = f"{len(unsaved)}" if len(unsaved) == len(signature.outputs) else f"{len(unsaved)} or {len(signature.outputs)}"
        raise ParityError(name, f"its reference gives {len(results)} results", f"{counts}: {', '.join(map(str, declared))}")
    for operand, result in zip(declared, results, strict=True):
        if tuple(result.shape) != operand.shape:
            found = f"its reference gives {operand.name} of shape {tuple(result.shape)}"
            raise ParityError(name, found, f"{operand.shape}, as the signature says")
    return {operand.name: result for operand, result in zip(declared, results, strict=True)}
