"""How torch reaches kernels: `enable` and `disable`, the torch op of each kernel, and the way from a kernel to its op.

`tpukern.dsl` calls `call` and `launch` for torch tensors; it imports this module only then.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpukern import choosing, device
from tpukern.errors import OverrideError
from tpukern.registry import REGISTRY

if TYPE_CHECKING:
    from tpukern.dsl import Kernel
    from tpukern.scoping import Scope


def enable(*, only: Iterable[str] | None = None, off: Iterable[str] | None = None, opt_in: Iterable[str] | str = ()) -> str:
    """Makes ``torch.device("tpu")`` work and puts kernels in the place of ATen's.

    Calling it again chooses anew. Overrides of a forward and a backward op are chosen together.

    Args:
        only: Kernels or ops to enable, and no others; an opt-in one has to be named in `opt_in` too.
        off: Kernels or ops to leave out.
        opt_in: Opt-in kernels or ops to enable besides, or "all".

    Returns:
        The kind of device: "tpu" or "emulated".

    Raises:
        DeviceError: There is no device.
        OverrideError: A name is unknown, or two kernels override one op.
    """
    _refuse_within_scope("enable")
    if device.started() is None:  # before that takes seconds
        for names in (() if only is None else only, off or (), () if opt_in == "all" else opt_in):
            if names:
                choosing.ops_of(names, choosing.declared_overrides())
    kind = device.start()  # before torch is imported, if it is not yet
    import tpukern.kernels  # noqa: F401 (declares the kernels that ship)
    from tpukern import calling, overriding, tagging  # noqa: F401 (need torch)

    chosen, left_out = overriding.choose(only=only, off=off, opt_in=opt_in)
    overriding.uninstall()
    overriding.install(chosen)
    REGISTRY.left_out = left_out
    if REGISTRY.device is None:
        print(f"tpukern: the tpu device is {device.description()}", file=sys.stderr)
    REGISTRY.device = kind
    tagging.tag(fresh=True)
    return kind


def disable() -> None:
    """Gives ATen's own kernels back.

    Ops of kernels stay. So do graphs that torch.compile made, until `torch._dynamo.reset()`. A backward pass whose forward pass
    ran as ours is ours still.
    """
    if REGISTRY.device is None:
        return
    from tpukern import overriding, tagging

    _refuse_within_scope("disable")
    overriding.uninstall()
    REGISTRY.left_out = {}
    tagging.tag()


def overrides(*, only: Iterable[str] | None = None, off: Iterable[str] | None = None) -> "Scope":
    """Narrows, for one ``with`` statement and this thread, what `enable` has put in the place of ATen's.

    Args:
        only: Kernels or ops that stay, and no others; enabled ones.
        off: Kernels or ops to leave out.

    Returns:
        What to enter: ``with tpukern.overrides(off=["rms_norm"]): ...``

    Raises:
        OverrideError: A name is unknown, or one of `only` is not enabled.
    """
    from tpukern import scoping

    return scoping.overrides(only=only, off=off)


def _refuse_within_scope(what: str) -> None:
    """Raises OverrideError inside of ``with tpukern.overrides(...)``, which holds for what was enabled around it."""
    if REGISTRY.device is None:
        return
    from tpukern import scoping

    if scoping.current() is not None:
        raise OverrideError(what, "a call inside of `with tpukern.overrides(...)`", "one outside of it")


def listen() -> None:
    """Registers the kernels declared so far, and every later one, as torch ops. Imports torch."""
    from tpukern import calling  # noqa: F401 (listens)


def call(kernel: "Kernel", args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """Calls a kernel's torch op: see `tpukern.calling.call`."""
    from tpukern import calling

    return calling.call(kernel, args, keywords)


def launch(kernel: "Kernel", tensors: Sequence[Any], keywords: Mapping[str, Any], layouts: Any = None) -> Any:
    """Runs a kernel on tensors without autograd: see `tpukern.calling.launch`."""
    from tpukern import calling

    return calling.launch(kernel, tensors, keywords, layouts)
