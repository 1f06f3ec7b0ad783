"""Scopes: which of the enabled overrides serve the calls of this thread, for the time of a ``with`` statement.

A scope holds where it was entered: in that thread, in what autograd runs for it, and in what `torch.compile` makes there. It is
also a mode of torch functions that does nothing, since torch.compile looks at these: a function compiled outside is compiled
once more inside, and each scope finds its own graph again.

A backward pass follows its forward pass and not the scope it runs in. What a forward pass left out here saved for it is
known by its storage.
"""

import contextlib
import threading
import types
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from tpukern import choosing
from tpukern.errors import OverrideError
from tpukern.registry import REGISTRY

LEFT_OUT: Final = "left out by overrides()"
MOST_STORAGES: Final = 256  # then those that are gone are forgotten
_KEY: Final = "tpukern.scope"

ENTERED: Final[list["Scope"]] = []  # of all threads: where it is empty, nobody has to ask further
_MODES: Final[dict[frozenset[str], type[TorchFunctionMode]]] = {}
STORAGES: Final[dict[int, StorageWeakRef]] = {}
_LOCK: Final = threading.Lock()


class Scope(contextlib.AbstractContextManager["Scope"]):
    """Overrides left out in one ``with`` statement. Made by `tpukern.overrides`.

    Attributes:
        without: The ATen ops that go to PyTorch's own kernels.
    """

    def __init__(self, without: frozenset[str]) -> None:
        self.without = without
        self._stack: contextlib.ExitStack | None = None

    def __enter__(self) -> "Scope":
        if self._stack is not None:
            raise OverrideError("overrides", "this scope was entered before", "one `with` for each call of overrides()")
        outer = current()
        without = self.without | (outer.without if outer is not None else frozenset())
        self.without = without
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(_mode(without))
        self._stack.enter_context(_compiling_apart(without))
        self._stack.callback(_stash, outer)
        self._stack.callback(self._forget)
        with _LOCK:
            ENTERED.append(self)
        _stash(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        assert self._stack is not None
        self._stack.close()

    def _forget(self) -> None:
        with _LOCK:
            ENTERED.remove(self)


def overrides(*, only: Iterable[str] | None = None, off: Iterable[str] | None = None) -> Scope:
    """Returns a scope: see `tpukern.overrides`."""
    every = choosing.declared_overrides()
    enabled = frozenset(op for op, _ in REGISTRY.active)
    without = frozenset(choosing.ops_of(off or (), every))
    if only is not None:
        wanted = choosing.ops_of(only, every)
        for op in sorted(wanted - enabled):
            why = REGISTRY.left_out.get(op, "no override is")
            raise OverrideError(
                "overrides", f"{op} is not enabled: {why}", "one that is", "Call tpukern.enable with it before."
            )
        without |= enabled - wanted
    return Scope(without)


def current() -> Scope | None:
    """Returns the scope that this thread, or what autograd does for one, is in."""
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None


def _stash(scope: Scope | None) -> None:
    torch._C._stash_obj_in_tls(_KEY, scope)


def leaves_out(op: str) -> bool:
    """Returns whether the scope that holds leaves an op to PyTorch."""
    scope = current() if ENTERED else None
    return scope is not None and op in scope.without


# --- what torch.compile makes ----------------------------------------------------------------------------------------


def _mode(without: frozenset[str]) -> TorchFunctionMode:
    """Returns a mode of a class of its own for these ops: Dynamo's guards tell modes apart by class."""
    with _LOCK:
        kind = _MODES.get(without)
        if kind is None:
            kind = _MODES[without] = type("OverridesLeftOut", (_Mode,), {})
    return kind()


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _compiling_apart(without: frozenset[str]) -> Any:
    """Keeps graphs apart in PyTorch's cache on disk; has the backward graph made with the forward one, not after the scope."""
    import torch._dynamo.config as dynamo_config
    from torch._functorch import config as functorch_config
    from torch.compiler import config

    mark = f"-without-{','.join(sorted(without))}"
    with (
        config.patch(cache_key_tag=config.cache_key_tag + mark),  # type: ignore[attr-defined]
        functorch_config.patch(force_non_lazy_backward_lowering=True),
        dynamo_config.patch(fake_tensor_cache_enabled=False),  # it keeps shapes by op, and marked results have others
    ):
        yield


# --- forward passes that were left out -------------------------------------------------------------------------------


def keep(results: Any) -> None:
    """Keeps that a native forward pass made these."""
    made = [r for r in (results if isinstance(results, tuple | list) else (results,)) if isinstance(r, torch.Tensor)]
    with _LOCK:
        if len(STORAGES) >= MOST_STORAGES:
            for address in [a for a, kept in STORAGES.items() if kept.expired()]:
                del STORAGES[address]
        for tensor in made:
            storage = tensor.untyped_storage()
            STORAGES[storage._cdata] = StorageWeakRef(storage)


def is_kept(tensors: Sequence[Any]) -> bool:
    """Returns whether one of them was made by a native forward pass that a scope asked for."""
    for tensor in tensors if STORAGES else ():
        if tensor is not None:
            kept = STORAGES.get(tensor.untyped_storage()._cdata)
            if kept is not None and not kept.expired():
                return True
    return False
