"""Faults as edits of a kernel's source: what goes wrong when one is written, in the places where this one has it.

They come from the syntax tree of the kernel's function, of its gradient's, and of whatever else of the same module these
reach by name (spans, helper functions, other kernels); a kernel that has a reference of its own is judged by itself. Nothing
here knows a kernel.
"""

import ast
import dataclasses
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from tpukern.dsl import Kernel

_SWAPS: Final = {
    "max": "min", "maximum": "minimum", "min": "max", "minimum": "maximum", "exp": "exp2", "exp2": "exp", "rsqrt": "sqrt",
    "sum": "mean", "mean": "sum", "log": "log2", "log2": "log", "sigmoid": "tanh", "erf": "tanh", "tanh": "sigmoid",
    "sin": "cos", "cos": "sin", "ones_like": "zeros_like", "cumsum": "cumprod",
}  # fmt: skip
_NEIGHBOURS: Final = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
_SIGNS: Final = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_PLACES: Final = {
    "start": ("off-by-one block", "stop"), "stop": ("off-by-one block", "start"),
    "first": ("wrong pl.when", "last"), "last": ("wrong pl.when", "first"),
}  # fmt: skip
_AXES: Final = {"0": "1", "1": "0", "-1": "0"}
_HUGE: Final = 1e9  # such constants stand for infinity
_LIBRARIES: Final = ("jnp", "jax", "math", "lax")
_SYNCHRONISE: Final = ("wait", "wait_send", "wait_recv", "start", "semaphore_wait", "semaphore_signal")
_SCRATCH: Final = '__import__("tpukern.dsl", fromlist=["Scratch"]).Scratch'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edit:
    """A stretch of the module's source, in bytes, and what takes its place."""

    start: int
    stop: int
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing done wrong.

    Attributes:
        kind: Which sort of mistake it is.
        where: The function, or the kernel in the traced program, that it is made in.
        direction: `forward`, or `backward` if only the gradient gets there.
        what: What is changed.
        line: Of the source; None for a change of the traced program.
        edits: Of the source.
        at: In the traced program: positions that the kind knows the meaning of.
    """

    kind: str
    where: str
    direction: str
    what: str
    line: int | None = None
    edits: tuple[Edit, ...] = ()
    at: tuple[int, ...] = ()

    def __str__(self) -> str:
        place = self.where if self.line is None else f"{self.where}, line {self.line}"
        return f"{self.kind} in {place}: {self.what}"


class Source:
    """The source of the module that a kernel is written in.

    Args:
        kernel: A forward kernel.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.path = Path(inspect.getsourcefile(kernel.fn) or "")
        self.bytes = self.path.read_bytes()
        self.module = sys.modules.get(kernel.fn.__module__)
        self._lines = [0]
        for line in self.bytes.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self.tree = ast.parse(self.bytes)
        self.named: dict[str, ast.stmt] = {}
        for statement in self.tree.body:
            targets = getattr(statement, "targets", [getattr(statement, "target", None)])
            for name in [getattr(statement, "name", None), *(t.id for t in targets if isinstance(t, ast.Name))]:
                if name is not None:
                    self.named[name] = statement

    def span(self, node: Any) -> tuple[int, int]:
        """Returns where a node stands, in bytes."""
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: Any) -> str:
        """Returns a node's source."""
        start, stop = self.span(node)
        return self.bytes[start:stop].decode()

    def edit(self, node: Any, text: str) -> Edit:
        """Returns the edit that puts `text` in the place of a node."""
        start, stop = self.span(node)
        return Edit(start=start, stop=stop, text=text)

    def edited(self, edits: Iterable[Edit]) -> bytes:
        """Returns the source after edits, and without what registers kernels with torch."""
        found, source = [*edits, *self._registrations()], self.bytes
        for edit in sorted(found, key=lambda e: e.start, reverse=True):
            source = source[: edit.start] + edit.text.encode() + source[edit.stop :]
        return source

    def _registrations(self) -> Iterator[Edit]:
        for node in ast.walk(self.tree):
            for decorator in getattr(node, "decorator_list", ()):
                for keyword in getattr(decorator, "keywords", ()):
                    if keyword.arg in ("op", "overrides"):
                        yield self.edit(keyword.value, "None" if keyword.arg == "op" else "()")

    def value(self, name: str) -> Any:
        """Returns what a name of the module stands for."""
        return getattr(self.module, name, None)

    def reached(self, *starts: str) -> dict[str, ast.stmt]:
        """Returns the module's own definitions that these names lead to, not through kernels that are judged by themselves."""
        found: dict[str, ast.stmt] = {}
        todo = [name for name in starts if name in self.named]
        while todo:
            name = todo.pop(0)
            if name in found:
                continue
            found[name] = self.named[name]
            for root in parts(self.named[name]):
                for node in ast.walk(root):
                    if not isinstance(node, ast.Name) or node.id not in self.named or node.id in found:
                        continue
                    other = self.value(node.id)
                    if not (isinstance(other, Kernel) and other.reference is not None):
                        todo.append(node.id)
        return found


def parts(statement: ast.stmt) -> list[ast.AST]:
    """Returns what of a definition decides what it computes: neither annotations nor decorators."""
    if isinstance(statement, ast.FunctionDef):
        defaults = [d for d in (*statement.args.defaults, *statement.args.kw_defaults) if d is not None]
        return [*defaults, *statement.body]
    value = getattr(statement, "value", None)
    return [] if value is None else [value]


def source_faults(kernel: Kernel) -> list[Fault]:
    """Returns the faults that a kernel's source has room for; none if it is made inside of a function."""
    if kernel.fn.__qualname__ != kernel.fn.__name__ or not inspect.getsourcefile(kernel.fn):
        return []
    source = Source(kernel)
    gradient = kernel.gradient
    starts = [kernel.fn.__name__, *(f.__name__ for f in (kernel.build,) if f is not None)]
    forward = source.reached(*starts)
    backward = source.reached(gradient.fn.__name__) if gradient is not None and gradient.reference is None else {}
    found: list[Fault] = []
    for name, statement in {**backward, **forward}.items():
        direction = "forward" if name in forward else "backward"
        found += _Finder(source, name, direction).all(statement)
    distinct = {fault.edits: fault for fault in reversed(found)}
    return sorted(distinct.values(), key=lambda f: (f.direction != "forward", f.line or 0, f.kind, f.what))


class _Finder:
    """Looks for places in one definition."""

    def __init__(self, source: Source, where: str, direction: str) -> None:
        self.source, self.where, self.direction = source, where, direction
        self.found: list[Fault] = []
        self.operands: dict[str, ast.Call] = {}
        self.refs: set[str] = set()  # what a store can go to

    def all(self, statement: ast.stmt) -> list[Fault]:
        if isinstance(statement, ast.FunctionDef):
            self.declaration(statement)
            for node in statement.body:
                self.walk(node)
            for body in _bodies(statement):
                self.sequence(body)
        else:
            for part in parts(statement):
                self.walk(part)
        return self.found

    def add(self, kind: str, node: Any, text: str, *more: Edit, what: str = "") -> None:
        edits = (self.source.edit(node, text), *more)
        short = what or f"{_short(self.source.text(node))} -> {_short(text)}"
        here = {"where": self.where, "direction": self.direction, "line": node.lineno}
        self.found.append(Fault(kind=kind, what=short, edits=edits, **here))

    # --- the declaration

    def declaration(self, function: ast.FunctionDef) -> None:
        a = function.args
        positional = [*a.posonlyargs, *a.args]
        defaults = zip(positional[len(positional) - len(a.defaults) :], a.defaults, strict=True)
        self.operands = {p.arg: d for p, d in defaults if isinstance(d, ast.Call)}
        inner = [f.args for f in ast.walk(function) if isinstance(f, ast.FunctionDef)]
        self.refs = {p.arg for args in inner for p in (*args.posonlyargs, *args.args)}
        for name, call in self.operands.items():
            role = _last_name(call.func)
            if role == "Acc":
                self.accumulator(function, name, call)
            if role in ("Out", "Acc") and _keyword(call, "init") is not None:
                self.add("missing init" if role == "Out" else "wrong init", call, self.without(call, "init"))
                if role == "Out":
                    self.narrow(function, name, call)
            if role in ("In", "Out") and call.args and "(" in (dims := self.source.text(call.args[0])):
                self.add("swapped index map", call.args[0], _groups_swapped(dims))
            if _keyword(call, "fill") is not None:
                self.add("missing ragged edge", call, self.without(call, "fill"))
            if (alias := _keyword(call, "alias")) is not None:
                self.add("stale alias", call, self.without(call, "alias"))
                for other in self.like(call, alias):
                    self.add("stale alias", alias, repr(other))

    def like(self, call: ast.Call, alias: ast.expr) -> list[str]:
        """Returns the inputs of the same dims that an output is not meant to be written over."""
        dims, mine = self.source.text(call.args[0]), ast.literal_eval(alias)
        inputs = {n: c for n, c in self.operands.items() if _last_name(c.func) == "In" and c.args}
        return [n for n, c in inputs.items() if n != mine and self.source.text(c.args[0]) == dims]

    def without(self, call: ast.Call, name: str, function: str = "") -> str:
        given = [self.source.text(a) for a in call.args]
        given += [f"{k.arg}={self.source.text(k.value)}" for k in call.keywords if k.arg != name]
        return f"{function or self.source.text(call.func)}({', '.join(given)})"

    def accumulator(self, function: ast.FunctionDef, name: str, call: ast.Call) -> None:
        self.add("missing init", call, self.without(call, "init", _SCRATCH))
        if _keyword(call, "init") is None:
            self.add("wrong init", call, self.source.text(call)[:-1] + ", init=1.0)")
        self.narrow(function, name, call)

    def narrow(self, function: ast.FunctionDef, name: str, call: ast.Call) -> None:
        """Keeps an accumulator in bfloat16."""
        more = []
        for node in ast.walk(function):
            if isinstance(node, ast.Assign | ast.AugAssign) and name in _stored(node):
                target = self.source.text(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                sign = {"Add": "+", "Mult": "*", "Sub": "-"}.get(type(getattr(node, "op", None)).__name__, "+")
                before = f"{target} {sign} " if isinstance(node, ast.AugAssign) else ""
                new = f"{target} = ({before}({self.source.text(node.value)})).astype({name}.dtype)"
                more.append(self.source.edit(node, new))
        kept = [self.source.text(k.value) for k in call.keywords if k.arg == "init"]
        init = f", init={kept[0]}" if kept else ""
        text = f'{self.source.text(call.func)}({self.source.text(call.args[0])}, "bfloat16"{init})'
        self.add("accumulator in bf16", call, text, *more)

    # --- statements

    def sequence(self, body: list[ast.stmt]) -> None:
        for first, second in itertools.pairwise(body):
            if _stored(first) & self.refs & _loaded(second):
                texts = [self.source.text(s) for s in (first, second)]
                what = f"{_short(texts[1])} comes before {_short(texts[0])}"
                self.add("read before write", first, texts[1], self.source.edit(second, texts[0]), what=what)
        for statement in body:
            stored = _stored(statement) & self.refs
            text = self.source.text(statement)
            if stored and isinstance(statement, ast.Assign | ast.AugAssign):
                self.add("dropped write", statement, "pass")
            if stored and isinstance(statement, ast.AugAssign):
                target, value = self.source.text(statement.target), self.source.text(statement.value)
                self.add("lost accumulation", statement, f"{target} = {value}")
                self.add("written twice", statement, f"{text}; {target} += {value}", what=f"{_short(text)} happens twice")
            if isinstance(statement, ast.If) and not any(isinstance(s, ast.Return) for s in statement.body):
                what = f"nothing is done if {_short(self.source.text(statement.test))}"
                self.add("dropped mask", statement.test, "False", what=what)
            called = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(called, ast.Call) and _last_name(called.func) in _SYNCHRONISE:
                self.add("unsynchronised DMA", statement, "pass")

    # --- expressions

    def walk(self, root: ast.AST) -> None:
        for node in ast.walk(root):
            if isinstance(node, ast.arguments):
                continue
            method = getattr(self, f"on_{type(node).__name__.lower()}", None)
            if method is not None:
                method(node)

    def on_binop(self, node: ast.BinOp) -> None:
        a, b = self.source.text(node.left), self.source.text(node.right)
        if isinstance(node.op, ast.Add):
            eps = isinstance(node.right, ast.Name) and "eps" in node.right.id
            self.add("eps dropped" if eps else "dropped term", node, f"({a})")
            self.add("flipped sign", node, f"({a} - ({b}))")
        if isinstance(node.op, ast.Sub):
            self.add("swapped operands", node, f"({b} - ({a}))")
            self.add("flipped sign", node, f"({a} + {b})")
            self.add("dropped term", node, f"({a})")
        if isinstance(node.op, ast.Mult):
            self.add("wrong scale", node, f"({a})")
            self.add("wrong scale", node, f"({b})")
        if isinstance(node.op, ast.Div):
            self.add("swapped operands", node, f"(({b}) / ({a}))")
            self.add("wrong scale", node, f"({a})")

    def on_unaryop(self, node: ast.UnaryOp) -> None:
        integer = isinstance(node.operand, ast.Constant) and isinstance(node.operand.value, int)
        if isinstance(node.op, ast.USub) and not integer:
            self.add("flipped sign", node, f"({self.source.text(node.operand)})")

    def on_constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, float) and node.value != 0:
            self.add("wrong scale" if abs(node.value) < _HUGE else "wrong fill", node, repr(_other(node.value)))

    def on_name(self, node: ast.Name) -> None:
        value = self.source.value(node.id) if isinstance(node.ctx, ast.Load) else None
        if isinstance(value, float):
            huge = abs(value) >= _HUGE
            self.add("wrong fill" if huge else "wrong scale", node, "0.0" if huge else f"({node.id} * 2)")

    def on_compare(self, node: ast.Compare) -> None:
        if len(node.ops) != 1:
            return
        a, b, op = node.left, node.comparators[0], type(node.ops[0])
        if op in _NEIGHBOURS:
            text = f"{self.source.text(a)} {_NEIGHBOURS[op]} {self.source.text(b)}"
            self.add("comparison off by one" if op in _SIGNS else "wrong comparison", node, text)
        if op in _SIGNS and all(isinstance(x, ast.Call) and _last_name(x.func) == "positions" for x in (a, b)):
            mine, others = (self.source.text(x.func.value) for x in (a, b))  # type: ignore[attr-defined]
            text = f"{self.source.text(a)} + ({others}.size - {mine}.size) {_SIGNS[op]} {self.source.text(b)}"
            self.add("wrong causal alignment", node, text)

    def on_attribute(self, node: ast.Attribute) -> None:
        if node.attr in _PLACES and isinstance(node.value, ast.Name):
            kind, other = _PLACES[node.attr]
            self.add(kind, node, f"{self.source.text(node.value)}.{other}")
        if node.attr in ("T", "mT"):
            self.add("wrong axis", node, self.source.text(node.value))

    def on_dict(self, node: ast.Dict) -> None:
        gradient = self.source.kernel.gradient
        results = {o.name for o in gradient.declaration.outputs} if gradient is not None else set()
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value in results:
                self.add("gradient dropped", value, f"({self.source.text(value)}) * 0")

    def on_call(self, node: ast.Call) -> None:
        name, text = _last_name(node.func), self.source.text
        if name == "where" and len(node.args) == 3:
            self.add("dropped mask", node, f"({text(node.args[1])})")
        if name == "mask" and len(node.args) == 3:
            self.add("dropped mask", node, f"({text(node.args[0])})")
        if name in ("where", "mask") and len(node.args) == 3:
            fill = text(node.args[2])
            if fill in ("0", "0.0"):
                self.add("wrong fill", node.args[2], "1.0")
        if name == "positions":
            self.add("off-by-one index", node, f"({text(node)} + 1)")
        if name == "program_id":
            self.add("off-by-one block", node, f"({text(node)} + 1)")
        if name in ("positions", "broadcasted_iota") and (axis := text(node.args[-1])) in _AXES:
            self.add("wrong axis", node.args[-1], _AXES[axis])
        if isinstance(node.func, ast.Attribute) and name in _SWAPS:
            library = text(node.func.value)
            if library.split(".")[0] in _LIBRARIES:
                self.add("wrong function", node.func, f"{library}.{_SWAPS[name]}")
        if name == "range":
            start, stop, step = (["0", *map(text, node.args), "1"] if len(node.args) == 1 else [*map(text, node.args), "1"])[:3]
            self.add("dropped last step", node, f"range({start}, ({stop}) - ({step}), {step})")
        if name == "astype" and isinstance(node.func, ast.Attribute):
            self.cast(node, node.func)
        if name == "dot" and len(node.args) >= 2:
            self.product(node)
        for keyword in node.keywords:
            self.keyword(node, keyword)

    def cast(self, node: ast.Call, function: ast.Attribute) -> None:
        value, dtype = self.source.text(function.value), self.source.text(node.args[0])
        if "F32" in dtype or "float32" in dtype:
            self.add("cast dropped", node, f"({value})")
            self.add("precision lowered", node, f'({value}).astype("bfloat16")')
        else:
            self.add("precision lowered", node, f'({value}).astype("bfloat16").astype({dtype})')

    def product(self, node: ast.Call) -> None:
        a, b, *rest = map(self.source.text, node.args)
        function = self.source.text(node.func)
        self.add("swapped operands", node, f"{function}({', '.join((b, a, *rest))})")
        contract = rest[0] if rest else "((1,), (0,))"
        other = f"tuple(tuple(1 - n for n in c) for c in {contract})"
        self.add("swapped dims in a contract", node, f"{function}({a}, {b}, {other})")

    def keyword(self, node: ast.Call, keyword: ast.keyword) -> None:
        value = self.source.text(keyword.value)
        if keyword.arg == "axis" and value in _AXES:
            self.add("wrong axis", keyword.value, _AXES[value])
        if keyword.arg == "keepdims" and value == "True":
            self.add("keepdims dropped", keyword.value, "False")
        called = self.source.value(node.func.id) if isinstance(node.func, ast.Name) else None
        if keyword.arg is not None and isinstance(called, Kernel) and keyword.arg in called.declaration.statics:
            self.add("dropped argument", node, self.without(node, keyword.arg))


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def _bodies(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for field in ("body", "orelse"):
            body = getattr(node, field, None)
            if isinstance(body, list):
                yield body


def _stored(statement: ast.stmt) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return {t.value.id for t in targets if isinstance(t, ast.Subscript) and isinstance(t.value, ast.Name)}


def _loaded(statement: ast.stmt) -> set[str]:
    value = getattr(statement, "value", None)
    nodes = ast.walk(value) if isinstance(value, ast.AST) else ()
    return {n.value.id for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name)}


def _groups_swapped(dims: str) -> str:
    before, _, rest = dims.partition("(")
    group, _, after = rest.partition(")")
    return f"{before}({' '.join(reversed(group.split()))}){after}"


def _other(value: float) -> float:
    return 0.0 if abs(value) >= _HUGE else value * 2


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 70 else f"{line[:67]}..."
