"""Whether a config gives the right results: asked once for the best one, before it is recorded.

The kernel runs in interpret form, with that config, at sizes that its blocks do not divide evenly where the tuned ones do not;
blocks are cut to 256 where the kernel has such a choice, to bound the work. Judge is the reference, with the tolerance and the
arithmetic of `tpukern verify`. A kernel without a reference (one that only others call) is held against its own default config.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tpukern.dsl import Config, Kernel, Signature, using
from tpukern.dsl.frozen import FrozenMapping
from tpukern.errors import TpukernError

_LARGEST_BLOCK: Final = 256
_LARGEST_WHOLE: Final = 512  # of a dim without blocks
_MOST_ELEMENTS: Final = 1 << 22  # of all operands together
_OWN_SHARE: Final = {"bfloat16": 2.0**-6, "float16": 2.0**-8}  # of the largest result, against the default config


def check(kernel: Kernel, signature: Signature, config: Config) -> tuple[str, str]:
    """Checks a config's results.

    Returns:
        What is wrong, empty if nothing is; and how it was checked.
    """
    forward = kernel.forward or kernel
    try:
        sizes, small = smaller(kernel, signature, config)
        if forward.reference is None or not _of_forward(forward, kernel, sizes, signature):
            return _against_default(kernel, signature, sizes, small)
        return _against_reference(forward, kernel, signature, sizes, small)
    except TpukernError as error:
        return str(error), "in interpret form"


def smaller(kernel: Kernel, signature: Signature, config: Config) -> tuple[dict[str, int], Config]:
    """Returns sizes and a config that are like the tuned ones, and small enough to run on a CPU."""
    limit = _LARGEST_BLOCK
    while True:
        sizes = {name: _size(kernel, config, name, size, limit) for name, size in signature.sizes.items()}
        total = sum(math.prod(sizes.get(n, 1) for n in o.names) for o in kernel.declaration.operands)
        if total <= _MOST_ELEMENTS or limit <= 16:
            break
        limit //= 2
    cut = {key: _block(kernel, key, value, limit) for key, value in config.items()}
    return sizes, Config(cut)


def _blocks(kernel: Kernel, config: Config, name: str) -> list[int]:
    """Returns the block sizes that a config has for a dim; in a composite, those of the kernels that it calls."""
    found = [value for key, value in config.items() if key.rpartition(".")[2] == f"block_{name}"]
    return [value for value in found if isinstance(value, int)]


def _size(kernel: Kernel, config: Config, name: str, size: int, limit: int) -> int:
    blocks = _blocks(kernel, config, name)
    if not blocks:
        dim = kernel.declaration.dims.get(name)
        return min(size, 2 if dim is not None and dim.each else max(_LARGEST_WHOLE * limit // _LARGEST_BLOCK, 8))
    block = min(max(blocks), limit)
    whole = 2 * block
    if size <= whole:
        return size
    return whole - 8 if size % max(blocks) else whole  # a last block that is cut short, if the tuned one is


def _block(kernel: Kernel, key: str, value: Any, limit: int) -> Any:
    if not key.rpartition(".")[2].startswith("block_") or not isinstance(value, int):
        return value
    return min(value, limit)


def _of_forward(forward: Kernel, kernel: Kernel, sizes: Mapping[str, int], signature: Signature) -> bool:
    """Whether a call of the kernel can be told as one of its forward kernel: all dims are the forward's."""
    return all(name in forward.declaration.dims or name in _names(forward) for name in sizes)


def _names(kernel: Kernel) -> set[str]:
    return {name for o in kernel.declaration.operands for name in o.names}


def _against_reference(
    forward: Kernel, kernel: Kernel, signature: Signature, sizes: Mapping[str, int], config: Config
) -> tuple[str, str]:
    from tpukern.testing import properties
    from tpukern.testing.programs import one_torch_thread
    from tpukern.testing.strategies import Case, Point

    inputs = {name for o in forward.declaration.inputs for name in o.names}
    plain = {name: value for name, value in signature.statics.items() if name in forward.declaration.statics}
    configs = {"forward": config} if kernel is forward else {"backward": config}
    point = Point(
        dtype=signature.dtype or (forward.dtypes or ("float32",))[0],
        sizes=FrozenMapping({name: size for name, size in sizes.items() if name in inputs}),
        statics=FrozenMapping(plain),
        **configs,
    )
    direction = "forward" if kernel is forward else "backward"
    how = f"interpret form against the reference at {_text(sizes)}, config {config}"
    session = properties.Session(forward, (direction,))
    with one_torch_thread():
        try:
            found = properties.parity(session, Case(point=point))
        finally:
            session.programs.close()
    return ("" if found is None else found.what), how


def _against_default(
    kernel: Kernel, signature: Signature, sizes: Mapping[str, int], config: Config
) -> tuple[str, str]:
    import jax

    asked = _resized(kernel, signature, sizes)
    rng = np.random.default_rng(0)
    arrays = [
        jax.numpy.asarray(
            np.zeros(o.shape, np.int32) if "int" in o.dtype else rng.standard_normal(o.shape, np.float32), o.dtype
        )
        for o in asked.inputs
    ]
    results = []
    for chosen in (config, None):
        bound = kernel.bind_signature(asked, chosen or kernel.declared_config(asked))
        with using(interpret=True):
            results.append([np.asarray(y, np.float64) for y in jax.jit(bound.function)(*arrays)])
    how = f"interpret form against its own default config at {_text(sizes)}, config {config}"
    for o, got, want in zip(asked.outputs, *results, strict=True):
        bound_by = _OWN_SHARE.get(signature.dtype or "", 2.0**-12) * max(1.0, float(np.max(np.abs(want), initial=0.0)))
        if not np.allclose(got, want, rtol=0.0, atol=bound_by, equal_nan=True):
            off = float(np.nanmax(np.abs(got - want)))
            return f"{o.name} differs from the default config's by {off:.3g}; expected at most {bound_by:.3g}", how
    return "", how


def _resized(kernel: Kernel, signature: Signature, sizes: Mapping[str, int]) -> Signature:
    import jax

    from tpukern.dsl.signature import axis_size

    specs = []
    for o in kernel.declaration.inputs:
        operand = next(given for given in signature.inputs if given.name == o.name)
        shape = tuple(axis_size(axis, sizes) for axis in o.array_axes)
        specs.append(jax.ShapeDtypeStruct(shape, jax.numpy.dtype(operand.dtype)))
    return kernel.signature(*specs, **signature.statics)


def _text(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())
