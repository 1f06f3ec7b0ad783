"""From sizes by name to operands' shapes: how a workload becomes a signature."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from tpukern.dsl.declaration import Declaration
from tpukern.dsl.signature import Signature, shape_of
from tpukern.dsl.workload import Workload
from tpukern.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from tpukern.dsl.kernel import Kernel


class _Spec(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


def workload_signature(kernel: "Kernel", workload: Workload) -> Signature:
    """Returns the signature of `workload`; of a gradient, that of its forward kernel's.

    Raises:
        ConfigError: A size is missing, or a name is neither a dim nor a static argument.
    """
    if kernel.forward is not None:
        return kernel.forward.gradient_signature(workload_signature(kernel.forward, workload))
    k = kernel.declaration
    statics = {name: value for name, value in workload.values.items() if name in k.statics}
    sizes, leading = _sizes(k, workload)
    specs = [_Spec(shape_of(o, sizes, leading), o.role.dtype or workload.dtype) for o in k.inputs]
    return kernel.signature(*specs, **statics)


def _sizes(k: Declaration, workload: Workload) -> tuple[dict[str, int], tuple[int, ...] | None]:
    subject = f"{k.kernel}, workload {workload.name}"
    dims = list(dict.fromkeys(name for o in k.inputs for name in o.names))
    values: dict[str, Any] = {name: k.statics[name] for name in k.int_statics if name in dims}
    for name, value in workload.values.items():
        if name in dims:
            values[name] = value
        elif name not in k.statics:
            known = [*dims, *(s for s in k.statics if s not in dims)]
            raise ConfigError(subject, f"no dim or static argument {name!r}", f"one of {known}", did_you_mean(name, known))
    missing = [name for name in dims if not isinstance(values.get(name), int | tuple)]
    if missing:
        raise ConfigError(subject, f"no size for {missing[0]!r}", f"one for each of {dims}")
    for name in dims:
        if any(size < 0 for size in (values[name] if isinstance(values[name], tuple) else (values[name],))):
            raise ConfigError(subject, f"{name} = {values[name]}", "a size of 0 or more")
    leading = None
    if k.star is not None:
        leading = values[k.star] if isinstance(values[k.star], tuple) else (values[k.star],)
        values[k.star] = math.prod(leading)
    return values, leading
