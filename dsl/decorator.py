"""The decorator that makes a function a kernel."""

from collections.abc import Callable
from typing import Any, Final, overload

from tpukern.dsl import rules
from tpukern.dsl.config import Config
from tpukern.dsl.declaration import read
from tpukern.dsl.kernel import Kernel, announce
from tpukern.dsl.signature import Signature
from tpukern.dsl.workload import Override, Workload
from tpukern.targets import Target

DTYPES: Final = ("bfloat16", "float32")


@overload
def kernel(fn: Callable[..., Any], /) -> Kernel: ...
@overload
def kernel(
    *,
    op: str | None = None,
    dtypes: tuple[str, ...] = DTYPES,
    reference: Callable[..., Any] | None = None,
    overrides: tuple[Override, ...] | list[Override] = (),
    workloads: tuple[Workload, ...] | list[Workload] = (),
    tolerance: Any = None,
    build: Callable[[Signature, Config], Callable[..., Any]] | None = None,
    vmem_limit_bytes: int | None = None,
    reject: Callable[[Config, Signature, Target | None], str | None] | None = None,
    name: str | None = None,
) -> Callable[[Callable[..., Any]], Kernel]: ...
def kernel(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    op: str | None = None,
    dtypes: tuple[str, ...] = DTYPES,
    reference: Callable[..., Any] | None = None,
    overrides: tuple[Override, ...] | list[Override] = (),
    workloads: tuple[Workload, ...] | list[Workload] = (),
    tolerance: Any = None,
    build: Callable[[Signature, Config], Callable[..., Any]] | None = None,
    vmem_limit_bytes: int | None = None,
    reject: Callable[[Config, Signature, Target | None], str | None] | None = None,
    name: str | None = None,
) -> Any:
    """Makes a function a kernel.

    Positional parameters are operands (`x: Ref = In("m k")`); after the `*` come grid dims (`m: Dim = Block(128, 256)`),
    tunables (`Choice`) and static arguments. The body gets Pallas refs, in order.

    Args:
        fn: The function, when the decorator is used bare.
        op: The torch op to register as, `namespace::name`.
        dtypes: What the element type shared by the operands without a type of their own may be.
        reference: The same in plain torch.
        overrides: The ATen ops that it stands in for.
        workloads: Named shapes to compile, verify and time.
        tolerance: How far it may be from the reference, in ULPs of the output's dtype.
        build: Takes a signature and a config and returns the JAX callable; then the function only declares.
        vmem_limit_bytes: VMEM to ask for, if more than the chip gives by itself.
        reject: Takes a config, a signature and a target; returns why that config is no good, or None.
        name: Its name, if not the function's.

    Raises:
        SignatureError: The declaration breaks a rule.
    """

    def make(function: Callable[..., Any]) -> Kernel:
        declaration = read(name or function.__name__, function, dtypes=tuple(dtypes), tile=build is None)
        rules.check(declaration)
        made = Kernel(
            declaration=declaration,
            fn=function,
            op=op,
            reference=reference,
            overrides=tuple(overrides),
            workloads=tuple(workloads),
            tolerance=tolerance,
            build=build,
            vmem_limit_bytes=vmem_limit_bytes,
            reject=reject,
        )
        announce(made)
        return made

    return make if fn is None else make(fn)
