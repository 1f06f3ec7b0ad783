"""The decorator that makes a function a kernel."""

from collections.abc import Callable, Mapping
from typing import Any, Final, overload

from tpukern import helion_adapter
from tpukern.dsl import rules
from tpukern.dsl.config import Config
from tpukern.dsl.declaration import read
from tpukern.dsl.helion_form import HelionForm
from tpukern.dsl.kernel import Kernel, announce
from tpukern.dsl.signature import Signature
from tpukern.dsl.workload import Override, Workload
from tpukern.errors import SignatureError
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
    frontend: str | None = None,
    signature: str | None = None,
    config: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
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
    frontend: str | None = None,
    signature: str | None = None,
    config: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
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
        tolerance: How far it may be from the reference, in ULPs of the output's dtype: a number, or numbers by dtype
            (`"float32"`), by result (`"y"`) or by both (`"y float32"`).
        build: Takes a signature and a config and returns the JAX callable; then the function only declares.
        vmem_limit_bytes: VMEM to ask for, if more than the chip gives by itself.
        reject: Takes a config, a signature and a target; returns why that config is no good, or None.
        name: Its name, if not the function's.
        frontend: `pallas` or `helion`; None to tell by the function: one that uses `helion.language`, or a `helion.kernel`, is
            Helion's.
        signature: Of a Helion kernel: the dims of its inputs and outputs, as `"x: r d, w: d -> y: r d"`. A dtype may follow
            the dims; `saved` follows outputs that are only kept for the backward pass. None to read them off the function.
        config: Of a Helion kernel: the `helion.Config` (or a mapping like one) to start from.
        settings: Of a Helion kernel: Helion's settings.

    Raises:
        SignatureError: The declaration breaks a rule.
    """

    def make(function: Callable[..., Any]) -> Kernel:
        called = name or function.__name__
        form = None
        if _is_helions(called, function, frontend):
            form = HelionForm(called, function, config=config, settings=settings or {})
            declaration = form.declared(signature, tuple(dtypes))
            function = form.function
        else:
            _nothing_of_helions(called, signature=signature, config=config, settings=settings)
            declaration = read(called, function, dtypes=tuple(dtypes), tile=build is None)
        rules.check(declaration)
        made = Kernel(
            declaration=declaration,
            fn=function,
            frontend="pallas" if form is None else "helion",
            helion=form,
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


def _is_helions(name: str, function: Any, frontend: str | None) -> bool:
    """Whether a function is of the Helion frontend: it says so, is a `helion.kernel`, or uses `helion.language`."""
    if frontend not in (None, "pallas", "helion"):
        raise SignatureError(name, f"frontend {frontend!r}", "'pallas' or 'helion'")
    if frontend is not None:
        return frontend == "helion"
    return helion_adapter.is_helion(function) or helion_adapter.uses_helion(function)


def _nothing_of_helions(name: str, **given: Any) -> None:
    """Raises SignatureError if an argument that only Helion kernels have was given."""
    for argument, value in given.items():
        if value is not None:
            found = f"{argument}= for a Pallas kernel"
            raise SignatureError(name, found, "it for a Helion kernel only", 'Say frontend="helion".')
