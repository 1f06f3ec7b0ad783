"""Kernels in the place of ATen's own, on the ``tpu`` device: which of them, and putting them there.

An override asks its `cond` whether it takes a call; if not, the kernel that was there before does, and the reason is kept.

Forward and backward of one op have to be of one making: the native attention's "logsumexp" is no log-sum-exp, and feeding
one's statistics to the other's backward pass gives wrong gradients without a word. So an override that says `token` marks
what its forward pass saved: the tensors of those names are ones of a shape that no native kernel returns. Its backward pass
runs for marked tensors and leaves all others to the native kernel, whatever has been enabled or disabled in between; it
stays installed after `disable` for what is still to come. Shapes survive torch.compile, which may make the backward graph
much later than the forward one.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import torch

from tpukern import routing
from tpukern.choosing import Chosen, ops_of
from tpukern.dsl import declared, source
from tpukern.errors import OverrideError
from tpukern.registry import REGISTRY

if TYPE_CHECKING:
    from tpukern.dsl import Kernel, Override

MOST_REASONS: Final = 64  # kept for one op; the rest are counted together
OTHER_REASONS: Final = "(other reasons)"


class Active:
    """One override, installed on one dispatch key.

    Attributes:
        op: The ATen op.
        key: The dispatch key.
        kernel: The kernel that stands in.
        override: How.
        calls: How many calls it took.
        reasons: How many it left, by reason.
        marked: Places of the results by which the backward pass knows ours.
        saved: Of a backward op, the arguments that its forward op made.
        digest: Of all that its behaviour depends on.
    """

    def __init__(self, kernel: "Kernel", override: "Override", key: str, counts: "Active | None" = None) -> None:
        self.op, self.key, self.kernel, self.override = override.op, key, kernel, override
        self.calls: int = counts.calls if counts else 0
        self.reasons: dict[str, int] = dict(counts.reasons) if counts else {}
        functions = tuple(f for f in (override.impl, override.cond) if f is not None)
        self.digest = source.digest(functions, repr((override.op, override.keys, override.token)))
        self.marked: frozenset[int] = frozenset()
        self.saved = _saved(self)
        self.undo: list[Callable[[], None]] = []
        self._library = torch.library.Library(self.op.partition("::")[0], "IMPL")

    @property
    def is_guard(self) -> bool:
        """Whether it is the backward pass of marked tensors."""
        return bool(self.override.token) and self.override.token[0] in {a.name for a in _overload(self)._schema.arguments}

    def add(self, name: str, route: Callable[..., Any], key: str, *, with_keyset: bool) -> None:
        """Registers `route` with torch."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*only once for all operators", category=UserWarning)
            self._library.impl(name, route, key, with_keyset=with_keyset, allow_override=True)

    def remove(self) -> None:
        """Takes everything registered back."""
        self._library._destroy()
        while self.undo:
            self.undo.pop()()

    def refused(self, reason: str) -> None:
        """Counts a call that was left to the native kernel."""
        if reason not in self.reasons and len(self.reasons) >= MOST_REASONS:
            reason = OTHER_REASONS
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


# --- which -----------------------------------------------------------------------------------------------------------


def _all() -> Chosen:
    """Returns the overrides of all kernels whose op was not refused; of one declared again, those of its newest version."""
    newest = {(k.fn.__module__, k.fn.__qualname__, k.op, tuple(o.op for o in k.overrides)): k for k in declared.kernels()}
    registered = {entry.kernel for entry in REGISTRY.ops.values()}
    current = [k for k in newest.values() if k.op is None or k in registered]
    return [(kernel, override) for kernel in current for override in kernel.overrides]


def choose(
    *, only: Iterable[str] | None, off: Iterable[str] | None, opt_in: Iterable[str] | str
) -> tuple[Chosen, dict[str, str]]:
    """Chooses overrides: see `tpukern.enable`.

    Returns:
        Those to install, and why the others are not.

    Raises:
        OverrideError: A name is unknown, or two of them are of one op.
    """
    every = _all()
    wanted = None if only is None else ops_of(only, every)
    without = ops_of(off or (), every)
    asked = {override.op for _, override in every} if opt_in == "all" else ops_of(opt_in, every)
    chosen, left_out = [], {}
    for kernel, override in every:
        if override.op in without:
            left_out[override.op] = "off"
        elif override.opt_in and override.op not in asked:
            left_out[override.op] = "opt-in, not asked for"
        elif wanted is not None and override.op not in wanted | (asked if override.opt_in else set()):
            left_out[override.op] = "not among only"
        else:
            chosen.append((kernel, override))
    _refuse_two(chosen)
    return chosen, left_out


def _refuse_two(chosen: Chosen) -> None:
    by_place: dict[tuple[str, str], Kernel] = {}
    for kernel, override in chosen:
        for key in override.keys:
            other = by_place.setdefault((override.op, key), kernel)
            if other is not kernel:
                found = f"kernels {other.name} and {kernel.name} both override {override.op}"
                raise OverrideError(
                    "enable", found, "one override for each op", f"Leave one out: enable(off=[{kernel.name!r}])."
                )


# --- installing ------------------------------------------------------------------------------------------------------


def install(chosen: Chosen) -> None:
    """Installs overrides, all of them or none."""
    uninstall()
    try:
        for kernel, override in chosen:
            for key in override.keys:
                _install(Active(kernel, override, key))
    except BaseException:
        uninstall()
        raise
    _forget_fake_results()


def uninstall() -> None:
    """Gives the native kernels back. Backward passes of marked tensors stay, for tensors that have been marked."""
    guards = [active for active in REGISTRY.active.values() if active.is_guard] + list(REGISTRY.guards.values())
    for active in (*REGISTRY.active.values(), *REGISTRY.guards.values()):
        active.remove()
    REGISTRY.active.clear()
    REGISTRY.guards.clear()
    for active in guards:
        _install(Active(active.kernel, active.override, active.key, counts=active), REGISTRY.guards)
    _forget_fake_results()


def _install(active: Active, into: dict[tuple[str, str], Active] | None = None) -> None:
    overload = _overload(active)
    schema = overload._schema
    _check_parameters(active, schema)
    name = _name(overload)
    guard = REGISTRY.guards.pop((active.op, active.key), None)
    if guard is not None:
        guard.remove()
    native = torch.library.get_kernel(overload, active.key)
    active.marked = frozenset(routing.place(schema.returns, t) for t in active.override.token if not active.is_guard)
    route = routing.route(active, schema, native.call_boxed)
    active.add(name, route, active.key, with_keyset=not routing.remembers(active, schema))
    if active.marked:
        _add_fake(active, overload, name)
    (REGISTRY.active if into is None else into)[active.op, active.key] = active


def _forget_fake_results() -> None:
    """Drops results of fake kernels that torch keeps by op and shapes: marked tensors have other shapes."""
    torch._subclasses.fake_tensor.FakeTensorMode.cache_clear()


def _overload(active: Active) -> Any:
    return _overload_of(active.op, active.kernel.name)


def _overload_of(op: str, kernel: str) -> Any:
    namespace, _, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    except AttributeError as error:
        raise OverrideError(kernel, f"no op {op!r}", "an op of PyTorch's, as aten::mm") from error


def _saved(active: Active) -> frozenset[str]:
    if not (routing.is_backward(active.op) and active.override.flips_with):
        return frozenset()
    forward = {a.name for a in _overload_of(active.override.flips_with[0], active.kernel.name)._schema.arguments}
    own = (a.name for a in _overload(active)._schema.arguments if "Tensor" in str(a.type))
    return frozenset(name for name in own if name not in forward and not name.startswith("grad"))


def _name(overload: Any) -> str:
    name: str = overload._schema.name.partition("::")[2]
    return f"{name}.{overload._schema.overload_name}" if overload._schema.overload_name else name


def _check_parameters(active: Active, schema: Any) -> None:
    """Checks that `impl` and `cond` can be called as the op is."""
    positional = [a for a in schema.arguments if not a.kwarg_only]
    keywords = {a.name: None for a in schema.arguments if a.kwarg_only}
    for what, function in (("impl", active.override.impl), ("cond", active.override.cond)):
        if function is None:
            continue
        try:
            inspect.signature(function).bind(*positional, **keywords)
        except TypeError as error:
            found = f"{what} of the override of {active.op} cannot be called as the op is: {error}"
            raise OverrideError(active.kernel.name, found, str(schema).partition(" ->")[0]) from error


# --- shapes in traces ------------------------------------------------------------------------------------------------


def _add_fake(active: Active, overload: Any, name: str) -> None:
    """Gives marked results their shape in traces too: PyTorch looks shapes up in the dispatcher, or in the op's own table."""
    meta, table = torch._C.DispatchKey.Meta, overload.py_kernels
    native = table.get(meta)
    shapes = routing.shapes_with_tokens(active, overload._schema, native or _boxed(overload, "Meta"))
    active.add(name, shapes, "Meta", with_keyset=False)
    if native is not None:
        table[meta] = shapes
        overload._dispatch_cache.clear()

        def undo() -> None:
            table[meta] = native
            overload._dispatch_cache.clear()

        active.undo.append(undo)


def _boxed(overload: Any, key: str) -> Callable[..., Any]:
    kernel, keyset = torch.library.get_kernel(overload, key), torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return functools.partial(kernel.call_boxed, keyset)
