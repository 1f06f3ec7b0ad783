"""The kernels that torch is to know of, by an op or an override, in order of declaration, and whoever wants to hear of them.

This is the one piece of state in the kernel language. Registering with torch is the dispatcher's work, which listens here;
the language itself never imports torch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tpukern.dsl.kernel import Kernel

_KERNELS: Final[list["Kernel"]] = []
_LISTENERS: Final[list[Callable[["Kernel"], None]]] = []


def announce(kernel: "Kernel") -> None:
    """Tells every listener of a kernel that torch is to know of: when it is declared, and again when it gets a gradient."""
    if kernel.op is None and not kernel.overrides:
        return
    if kernel not in _KERNELS:
        _KERNELS.append(kernel)
    for listener in _LISTENERS:
        listener(kernel)


def listen(listener: Callable[["Kernel"], None]) -> None:
    """Calls `listener` with every kernel announced so far, and with every later one."""
    _LISTENERS.append(listener)
    for kernel in tuple(_KERNELS):
        listener(kernel)


def kernels() -> tuple["Kernel", ...]:
    """Returns the kernels announced so far."""
    return tuple(_KERNELS)
