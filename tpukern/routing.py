"""What torch calls in the place of an ATen op: asks once whether our kernel takes such a call, then remembers.

`cond` and `impl` of an override may look at the shapes, dtypes and strides of tensors and at the other arguments, and at
nothing else: torch.compile runs them once for a graph, and here they run once for calls that are alike in these. Where
`impl` turned out to be one launch of a kernel on the op's own tensors, later calls go straight to the registered kernel.
"""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Final

import torch

from tpukern import scoping, torch_tpu_adapter
from tpukern.errors import OverrideError, SignatureError
from tpukern.launching import CALLER, Launch

if TYPE_CHECKING:
    from tpukern.overriding import Active

MOST_KNOWN: Final = 4096  # kinds of calls of one op; then all are forgotten
TOKEN_SHAPE: Final = (1, 1, 1)
NATIVE_FORWARD: Final = "the forward pass was ATen's own"
BACKEND_KEY: Final = "PrivateUse1"

Direct = Callable[[Sequence[Any]], Any]


def route(active: "Active", schema: Any, leave: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function to register for an op.

    Args:
        active: The override.
        schema: The op's.
        leave: The kernel that was there before: `leave(keyset, *args, **kwargs)`.

    Returns:
        `route(keyset, *args, **kwargs)`; on the backend's own key `route(*args, **kwargs)`, which remembers.
    """
    takes, serve = _conditions(active, schema), _implementation(active, schema)
    scoped = _scoped(active, schema)
    if remembers(active, schema):
        return _Remembering(active, schema, takes, serve, scoped, leave).generate()

    def plain(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if scoping.leaves_out(active.op):
            active.refused(scoping.LEFT_OUT)
            return leave(keyset, *args, **kwargs)
        reason = takes(*args, **kwargs)
        if reason is None:
            active.calls += 1
            return serve(*args, **kwargs)
        active.refused(reason)
        return leave(keyset, *args, **kwargs)

    return plain


def remembers(active: "Active", schema: Any) -> bool:
    """Returns whether calls are remembered. On other keys they may be those of a trace, with symbols for sizes."""
    return active.key == BACKEND_KEY and all(str(a.type) in _KEYS for a in schema.arguments)


# --- remembering -----------------------------------------------------------------------------------------------------

_TENSOR = "{0}.shape, {0}.dtype, {0}.is_contiguous() or {0}.stride()"
_LIST, _PLAIN = "tuple({0})", "{0}"
_OPTIONAL: Final = {"Tensor": "Optional[Tensor]"}
_KEYS: Final = {
    "Tensor": _TENSOR,
    "Optional[Tensor]": f"None if {{0}} is None else ({_TENSOR})",
    **dict.fromkeys(("List[int]", "List[SymInt]", "List[bool]", "List[float]"), _LIST),
    **{f"Optional[List[{kind}]]": "{0} and tuple({0})" for kind in ("int", "SymInt", "bool", "float")},
    **dict.fromkeys(("int", "SymInt", "float", "bool", "str"), _PLAIN),
    **{f"Optional[{kind}]": _PLAIN for kind in ("int", "SymInt", "float", "bool", "str", "Dtype")},
    "number": "{0}.__class__, {0}",
}


class _Remembering:
    """What is known of the calls of one op.

    Attributes:
        direct: Kinds of calls that are one launch: the kernel's call, of the op's tensors.
        others: Those left to the native kernel, and those that `impl` has to serve: a function of all arguments.
    """

    def __init__(
        self,
        active: "Active",
        schema: Any,
        takes: Callable[..., str | None],
        serve: Callable[..., Any],
        scoped: "Scoped",
        leave: Callable[..., Any],
    ) -> None:
        self.active, self.schema, self.takes, self.serve, self.scoped = active, schema, takes, serve, scoped
        self.leave = functools.partial(leave, torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, BACKEND_KEY)))
        self.positional = sum(not a.kwarg_only for a in schema.arguments)
        self.keywords = [a.name for a in schema.arguments if a.kwarg_only]
        self.tensors = [at for at, a in enumerate(schema.arguments) if "Tensor" in str(a.type)]
        self.direct: dict[tuple[Any, ...], Direct] = {}
        self.others: dict[tuple[Any, ...], Callable[[tuple[Any, ...]], Any]] = {}

    def generate(self) -> Callable[..., Any]:
        """Writes the function out for the op's own arguments: a loop over them would take longer than all the rest."""
        arguments = self.schema.arguments
        names = [f"a{at}" if at < self.positional else a.name for at, a in enumerate(arguments)]
        scope: dict[str, Any] = {f"d{at}": a.default_value for at, a in enumerate(arguments) if a.has_default_value()}
        written = [f"{name}=d{at}" if f"d{at}" in scope else name for at, name in enumerate(names)]
        if self.keywords:
            written.insert(self.positional, "*")
        kinds = [str(a.type) for a in arguments]
        strict = ", ".join(_KEYS[kind].format(name) for name, kind in zip(names, kinds, strict=True))
        lenient = ", ".join(_KEYS[_OPTIONAL.get(kind, kind)].format(name) for name, kind in zip(names, kinds, strict=True))
        every, tensors = ", ".join(names), ", ".join(names[at] for at in self.tensors)
        scope |= {f"w{at}": watched for at, watched in enumerate(self.scoped.watched)}
        watched = " or ".join(f"w{at}" for at in range(len(self.scoped.watched))) or "False"
        text = f"""
def route({", ".join(written)}):
    if ({watched}) and left_out(({every},)):
        return leave(({every},))
    try:
        key = ({strict},)
    except AttributeError:  # a tensor that is None
        key = ({lenient},)
    run = direct(key)
    if run is None:
        return otherwise(key, ({every},))
    try:
        return run([{tensors}])
    except RuntimeError:
        explain(key, [{tensors}])
        raise
"""
        scope |= {"direct": self.direct.get, "otherwise": self.otherwise, "explain": self.explain}
        exec(text, scope | {"left_out": self.scoped.leaves, "leave": self.natively}, scope)
        function: Callable[..., Any] = scope["route"]
        return function

    def otherwise(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        run = self.others.get(key)
        return run(args) if run is not None else self.learn(key, args)

    def explain(self, key: tuple[Any, ...], tensors: list[Any]) -> None:
        """Raises SignatureError if the tensors are on different devices; torch_tpu's own words name no operand."""
        names = [self.schema.arguments[at].name for at in self.tensors]
        kinds = {t.device.type for t in tensors if t is not None}
        if len(kinds) > 1:
            where = ", ".join(f"{name} on {t.device.type}" for name, t in zip(names, tensors, strict=True) if t is not None)
            raise SignatureError(self.active.kernel.name, f"{self.active.op} got {where}", "all tensors on one device")

    def split(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args[: self.positional], dict(zip(self.keywords, args[self.positional :], strict=True))

    def learn(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
        """Serves a call of a new kind, and keeps how."""
        given, keywords = self.split(args)
        if len(self.direct) + len(self.others) >= MOST_KNOWN:
            self.direct.clear()
            self.others.clear()
        self.explain(key, [args[at] for at in self.tensors])
        reason = self.takes(*given, **keywords)
        if reason is not None:
            self.others[key] = self.refusing(reason)
            return self.others[key](args)
        self.active.calls += 1
        outer, CALLER.launches = CALLER.launches, []
        try:
            results = self.serve(*given, **keywords)
            launches = CALLER.launches
        finally:
            CALLER.launches = outer
        tensors = [args[at] for at in self.tensors]
        if len({id(t) for t in tensors if t is not None}) < sum(t is not None for t in tensors):
            return results  # one tensor given twice would be taken for a rule
        run = _direct(launches, tensors, results, self.active.marked)
        if run is not None:
            self.direct[key] = run
        else:
            self.others[key] = self.serving
        return results

    def natively(self, args: tuple[Any, ...]) -> Any:
        """Serves a call that a scope leaves out."""
        self.active.refused(scoping.LEFT_OUT)
        given, keywords = self.split(args)
        results = self.leave(*given, **keywords)
        self.scoped.left(results)
        return results

    def refusing(self, reason: str) -> Callable[[tuple[Any, ...]], Any]:
        def refuse(args: tuple[Any, ...]) -> Any:
            self.active.refused(reason)
            given, keywords = self.split(args)
            return self.leave(*given, **keywords)

        return refuse

    def serving(self, args: tuple[Any, ...]) -> Any:
        self.active.calls += 1
        given, keywords = self.split(args)
        return self.serve(*given, **keywords)


def _direct(launches: Sequence[Launch], given: list[Any], results: Any, marked: frozenset[int]) -> Direct | None:
    """Returns what makes the same call without `impl`, if that did no more than launch one kernel on the op's tensors.

    Args:
        launches: What `impl` launched.
        given: The op's tensors, no two of them the same.
        results: What `impl` returned, marks put in.
        marked: Places of the marks.
    """
    if len(launches) != 1 or launches[0].plan.prepared.entry is None:
        return None
    launch = launches[0]
    places = [next((at for at, arg in enumerate(given) if arg is tensor), None) for tensor in launch.tensors]
    made = launch.outputs if isinstance(launch.outputs, tuple) else (launch.outputs,)
    wanted = results if isinstance(results, tuple) else (results,)
    parts = [_part(at in marked, result, made) for at, result in enumerate(wanted)]
    if None in places or None in parts or not places:
        return None
    run = launch.plan.run if places == list(range(len(given))) else _picking(launch.plan.run, places)
    if parts == [("output", at) for at in range(len(made))] and isinstance(results, tuple) == isinstance(launch.outputs, tuple):
        return run
    return _assembling(run, [part for part in parts if part is not None], single=not isinstance(results, tuple))


def _part(is_mark: bool, result: Any, made: tuple[Any, ...]) -> tuple[str, Any] | None:
    """Says where a result comes from: ("output", place), ("mark", None) or ("constant", value); None for elsewhere."""
    if is_mark:
        return "mark", None
    place_of = next((at for at, output in enumerate(made) if output is result), None)
    if place_of is not None:
        return "output", place_of
    return ("constant", result) if result is None or isinstance(result, int | float) else None


def _picking(run: Direct, places: Sequence[Any]) -> Direct:
    if len(places) == 1:
        (at,) = places
        return lambda tensors: run([tensors[at]])
    pick = operator.itemgetter(*places)
    return lambda tensors: run(pick(tensors))


def _assembling(run: Direct, parts: Sequence[tuple[str, Any]], *, single: bool) -> Direct:
    def assemble(tensors: Sequence[Any]) -> Any:
        made = run(tensors)
        outputs = made if isinstance(made, tuple) else (made,)
        results = [outputs[what] if kind == "output" else token() if kind == "mark" else what for kind, what in parts]
        return results[0] if single else tuple(results)

    return assemble


# --- scopes ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoped:
    """What scopes are to one op.

    Attributes:
        watched: Where all of these are empty, no call is left out.
        leaves: Whether a call is left out, by all its arguments.
        left: Told what a call that was left out returned.
    """

    watched: tuple[Sized, ...]
    leaves: Callable[[tuple[Any, ...]], bool]
    left: Callable[[Any], None]


def _scoped(active: "Active", schema: Any) -> Scoped:
    op = active.op
    if not is_backward(op):
        keep = scoping.keep if active.override.flips_with and not active.marked else lambda results: None
        return Scoped(watched=(scoping.ENTERED,), leaves=lambda args: scoping.leaves_out(op), left=keep)
    if active.is_guard:  # the marks tell
        return Scoped(watched=(), leaves=lambda args: False, left=lambda results: None)
    places = [at for at, name in enumerate(a.name for a in schema.arguments) if name in active.saved]

    def leaves(args: tuple[Any, ...]) -> bool:
        if torch_tpu_adapter.may_be_compiling():  # of the graph that is made, forward and backward, in one scope
            return scoping.leaves_out(op)
        return scoping.is_kept([args[at] for at in places])

    return Scoped(watched=(scoping.ENTERED, scoping.STORAGES), leaves=leaves, left=lambda results: None)


def is_backward(op: str) -> bool:
    """Returns whether an ATen op is the backward pass of another one."""
    return "_backward" in op


# --- what an override says -------------------------------------------------------------------------------------------


def _always(*args: Any, **kwargs: Any) -> None:
    return None


def _conditions(active: "Active", schema: Any) -> Callable[..., str | None]:
    takes = _complete(active.override.cond or _always, schema)
    if not active.is_guard:
        return takes
    at = place(schema.arguments, active.override.token[0])

    def guarded(*args: Any, **kwargs: Any) -> str | None:
        if args[at] is None or tuple(args[at].shape) != TOKEN_SHAPE:
            return NATIVE_FORWARD
        reason = takes(*args, **kwargs)
        if reason is not None:
            found = f"the override of {active.op} refuses what its forward pass took: {reason}"
            raise OverrideError(active.kernel.name, found, "conditions on what both passes see")
        return None

    return guarded


def _implementation(active: "Active", schema: Any) -> Callable[..., Any]:
    impl, op, caller, marked = _complete(active.override.impl, schema), active.op, CALLER, active.marked

    def serve(*args: Any, **kwargs: Any) -> Any:
        outer, caller.op = caller.op, op
        try:
            results = impl(*args, **kwargs)
        finally:
            caller.op = outer
        if not marked:
            return results
        mark = token()
        return tuple(mark if at in marked else r for at, r in enumerate(results))

    return serve


def place(named: Sequence[Any], name: str) -> int:
    """Returns where an argument or return of that name stands."""
    return next(at for at, argument in enumerate(named) if argument.name == name)


def token() -> torch.Tensor:
    """Returns the tensor that marks what our forward pass saved. A graph has to make its own."""
    return _new_token() if torch_tpu_adapter.may_be_compiling() else _kept_token()


def _new_token() -> torch.Tensor:
    with torch.inference_mode(False):  # one made for inference could not be saved for a later backward pass
        return torch.zeros(TOKEN_SHAPE, dtype=torch.int64, device="tpu")


_kept_token = functools.cache(_new_token)


def shapes_with_tokens(active: "Active", schema: Any, native: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the fake kernel of an op whose forward pass marks results: the native one, but for their shape."""
    takes = _complete(active.override.cond or _always, schema)

    def shapes(*args: Any, **kwargs: Any) -> Any:
        results = native(*args, **kwargs)
        if scoping.leaves_out(active.op) or takes(*args, **kwargs) is not None:
            return results
        return tuple(r.new_empty(TOKEN_SHAPE) if at in active.marked else r for at, r in enumerate(results))

    return shapes


def _complete(function: Callable[..., Any], schema: Any) -> Callable[..., Any]:
    """Returns `function` with the schema's defaults filled in: the dispatcher leaves out arguments that equal theirs."""
    if function is _always:
        return function
    parameters = inspect.signature(function).parameters
    optional = [a for a in schema.arguments if a.has_default_value()]
    if all(a.name in parameters and parameters[a.name].default == a.default_value for a in optional):
        return function
    positional = [a.default_value if a.has_default_value() else None for a in schema.arguments if not a.kwarg_only]
    keywords: Mapping[str, Any] = {a.name: a.default_value for a in optional if a.kwarg_only}

    def complete(*args: Any, **kwargs: Any) -> Any:
        return function(*args, *positional[len(args) :], **{**keywords, **kwargs})

    return complete
