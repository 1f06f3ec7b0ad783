"""Torch inputs as torch has them: transposed, cut out of larger ones, repeated by a stride of 0."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from tpukern.dsl import Kernel
from tpukern.errors import ParityError
from tpukern.testing import programs, reference
from tpukern.testing.findings import Finding
from tpukern.testing.programs import Plan
from tpukern.testing.properties import Session, judged, refused
from tpukern.testing.strategies import Case, differentiated

LAYOUTS: Final = ("transposed", "offset", "every second", "repeated")


def strides(session: Session, case: Case) -> Iterator[Finding | None]:
    """The torch op gives the same for inputs of any strides and offset, and so does autograd. Yields one answer a layout."""
    plan = programs.plan(session.kernel, case.point, gradient=session.gradient)
    for layout in LAYOUTS:
        try:
            found = _judged(session, plan, case, layout)
        except Exception as error:
            found = refused(session, case, "strides", error)
        if found is not None:
            yield Finding(
                property="strides", direction=found.direction, what=f"inputs {layout}: {found.what}", case=case,
                output=found.output, ulps=found.ulps, bound=found.bound, got=found.got, want=found.want,
            )  # fmt: skip
        else:
            yield None


def _judged(session: Session, plan: Plan, case: Case, layout: str) -> Finding | None:
    operands = plan.operands(case)
    tensors = [laid_out(a, layout) for a in operands]
    given = [reference.array(t).copy() for t in tensors]  # "repeated" ones are not the case's; a wrong kernel may write to them
    results = through_torch(session.kernel, plan, tensors)
    return judged(session, plan, case, given, results, "strides")


def laid_out(array: np.ndarray, layout: str) -> Any:
    """Returns an array as a tensor of a memory layout. "repeated" repeats the first entry of the first axis."""
    import torch

    plain = reference.tensor(array, False)
    if plain.dim() == 0:
        return plain
    if layout == "transposed":
        return plain.mT.contiguous().mT if plain.dim() > 1 else plain
    if layout == "offset":
        around = torch.full([n + 3 for n in plain.shape], 7, dtype=plain.dtype)
        inside = around[tuple(slice(2, n + 2) for n in plain.shape)]
        inside.copy_(plain)
        return inside
    if layout == "every second":
        wide = torch.full([*plain.shape[:-1], 2 * plain.shape[-1]], 7, dtype=plain.dtype)
        wide[..., ::2] = plain
        return wide[..., ::2]
    return plain[:1].expand(plain.shape) if plain.shape[0] else plain


def through_torch(kernel: Kernel, plan: Plan, tensors: Sequence[Any]) -> reference.Arrays:
    """Returns what the torch op and autograd give: outputs that are not saved, and gradients.

    Raises:
        ParityError: Autograd does not reach an input that the kernel has a gradient for.
    """
    import torch

    count = len(plan.signature.inputs)
    wanted = differentiated(kernel) if plan.backward is not None else ()
    inputs = [t.detach() for t in tensors[:count]]
    leaves = {}
    for o, t in zip(plan.signature.inputs, inputs, strict=True):
        if o.name in wanted:
            leaves[o.name] = t.requires_grad_()
    given = kernel(*inputs, **plan.point.statics, **plan.point.forward)
    outputs = given if isinstance(given, tuple) else (given,)
    shown = [o.name for o in plan.signature.outputs if o.name not in plan.signature.saved]
    results = dict(zip(shown, outputs, strict=True))
    if leaves:
        found = torch.autograd.grad(outputs, list(leaves.values()), tensors[count:], allow_unused=True)
        missing = [name for name, g in zip(leaves, found, strict=True) if g is None]
        if missing:
            raise ParityError(kernel.name, f"autograd gives no gradient of {missing[0]}")
        results |= {f"d{name}": g for name, g in zip(leaves, found, strict=True)}
    return {name: reference.array(t) for name, t in results.items()}
