"""What the source of a Helion function says: the ranks and dims of its tensors, its tile loops, and the names it returns.

Read off the syntax tree, so that declaring a kernel loads neither torch nor Helion.
"""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from tpukern.errors import SignatureError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loops:
    """The `hl.tile` and `hl.grid` loops of a function.

    Attributes:
        root: Dims that the outermost loops walk over, in order.
        dims: Every loop variable whose dim is known, and the dim.
    """

    root: tuple[str, ...]
    dims: dict[str, str]


class Source:
    """A Helion function's syntax tree, and which of its names stand for which size of which tensor.

    Args:
        kernel: The kernel's name, for errors.
        function: The function.
        tensors: Its tensor parameters.

    Raises:
        SignatureError: Its source cannot be read.
    """

    def __init__(self, kernel: str, function: Callable[..., Any], tensors: tuple[str, ...]) -> None:
        self.kernel, self.tensors = kernel, tensors
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError, SyntaxError) as error:
            raise SignatureError(kernel, "the source of the function cannot be read", "a function in a file") from error
        node = tree.body[0]
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef), "a decorated function"
        self.node = node
        self._same: dict[Any, Any] = {}
        self.ranks: dict[str, int] = {}
        for statement in ast.walk(node):
            self._read(statement)

    # --- which sizes are one

    def _find(self, key: Any) -> Any:
        while self._same.get(key, key) != key:
            key = self._same[key]
        return key

    def _join(self, a: Any, b: Any) -> None:
        first, second = self._find(a), self._find(b)
        if first != second:
            self._same[first] = second

    def _size(self, node: ast.AST) -> Any:
        """Returns the key of an expression that is a size (`m`, `x.size(0)`, `x.shape[-1]`, `hl.specialize(m)`), else None."""
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Call) and _last(node.func) == "specialize" and node.args:
            return self._size(node.args[0])
        owner, index = None, None
        if isinstance(node, ast.Call) and _last(node.func) == "size" and len(node.args) == 1:
            owner, index = node.func.value, node.args[0]  # type: ignore[attr-defined]
        elif isinstance(node, ast.Subscript) and _last(node.value) == "shape":
            owner, index = node.value.value, node.slice  # type: ignore[attr-defined]
        place = _number(index)
        if isinstance(owner, ast.Name) and owner.id in self.tensors and place is not None:
            return (owner.id, place)
        return None

    def _read(self, statement: ast.AST) -> None:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            self._assigned(statement.targets[0], statement.value)
        elif isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare):
            sides = [self._size(side) for side in (statement.test.left, *statement.test.comparators)]
            if all(isinstance(op, ast.Eq) for op in statement.test.ops) and None not in sides:
                for side in sides[1:]:
                    self._join(sides[0], side)
        elif isinstance(statement, ast.Subscript) and isinstance(statement.value, ast.Name):
            name, parts = statement.value.id, _parts(statement.slice)
            if name in self.tensors and not any(isinstance(p, ast.Constant) for p in parts):
                self.ranks.setdefault(name, len(parts))

    def _assigned(self, target: ast.AST, value: ast.AST) -> None:
        owner = _whole_shape(value)
        if isinstance(target, ast.Tuple | ast.List) and owner in self.tensors:
            names = [part.id if isinstance(part, ast.Name) else None for part in target.elts]
            if not any(isinstance(part, ast.Starred) for part in target.elts):
                self.ranks[str(owner)] = len(names)
                for place, name in enumerate(names):
                    if name and name != "_":
                        self._join((owner, place), name)
        elif isinstance(target, ast.Name):
            key = self._size(value)
            if key is not None and key != target.id:
                self._join(target.id, key)

    # --- dims

    def dims(self, *, aligned: bool = False) -> dict[str, str]:
        """Returns a dims string for every tensor parameter.

        Args:
            aligned: Take axes that the function does not name for the first tensor's, counted from the last.

        Raises:
            SignatureError: The function does not tell a tensor's rank.
        """
        self._join_walked()
        for name in self.tensors:
            if name not in self.ranks:
                example = f'signature="{name}: r d, ..."'
                found = f"the function does not tell the rank of {name}"
                raise SignatureError(self.kernel, found, f"sizes taken from it (m, n = {name}.size()), or {example}")
        if aligned:
            self._align()
        used: dict[Any, str] = {}
        found_dims = {}
        for name in self.tensors:
            axes = []
            for place in range(self.ranks[name]):
                for key in ((name, place), (name, place - self.ranks[name])):
                    self._join(key, (name, place))
                axes.append(self._named((name, place), f"{name}{place}", used))
            found_dims[name] = " ".join(axes)
        return found_dims

    def _align(self) -> None:
        first = self.tensors[0]
        for name in self.tensors[1:]:
            for back in range(1, 1 + min(self.ranks[first], self.ranks[name])):
                mine, theirs = (name, self.ranks[name] - back), (first, self.ranks[first] - back)
                for key in (mine, theirs):
                    self._join((key[0], key[1] - self.ranks[key[0]]), key)
                if not self._names(mine):
                    self._join(mine, theirs)

    def _names(self, key: Any) -> list[str]:
        """Returns the variables that hold a size."""
        root = self._find(key)
        return [n for n in (*self._same, *self._same.values()) if isinstance(n, str) and self._find(n) == root]

    def _named(self, key: Any, otherwise: str, used: dict[Any, str]) -> str:
        root = self._find(key)
        if root not in used:
            stripped = [n.strip("_") for n in self._names(key) if n.strip("_")] or [otherwise]
            free = [n for n in stripped if n not in used.values()] or [otherwise]
            used[root] = free[0]
        return used[root]

    def _join_walked(self) -> None:
        """Joins the size of an axis with that of the loop whose variable it is indexed with."""
        sizes = {variable: key for variable, key, _ in self._loops()}
        for node in ast.walk(self.node):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in self.tensors:
                parts = _parts(node.slice)
                if len(parts) == self.ranks.get(node.value.id):
                    for place, part in enumerate(parts):
                        key = sizes.get(part.id) if isinstance(part, ast.Name) else None
                        if key is not None:
                            self._join((node.value.id, place), key)

    # --- loops

    def _loops(self) -> Iterator[tuple[str, Any, bool]]:
        """Yields (loop variable, key of the size, whether it is outermost) of every tile loop."""

        def visit(node: ast.AST, outermost: bool) -> Iterator[tuple[str, Any, bool]]:
            for child in ast.iter_child_nodes(node):
                inner = outermost
                call = child.iter if isinstance(child, ast.For) and isinstance(child.iter, ast.Call) else None
                if isinstance(child, ast.For) and call is not None and _last(call.func) in ("tile", "grid"):
                    targets = _parts(child.target)
                    sizes = _parts(call.args[0]) if len(call.args) == 1 else []
                    for target, size in zip(targets, sizes, strict=False):
                        if isinstance(target, ast.Name):
                            yield target.id, self._size(size), outermost
                    inner = False
                yield from visit(child, inner)

        yield from visit(self.node, True)

    def loops(self, dims: dict[str, str]) -> Loops:
        """Returns the tile loops, in terms of the tensors' dims strings."""
        names: dict[Any, str] = {}
        for name, text in dims.items():
            tokens = text.split()
            for place, token in enumerate(tokens):
                if token.lstrip("*").isidentifier():
                    for key in ((name, place), (name, place - len(tokens))):
                        names.setdefault(self._find(key), token.lstrip("*"))
        self._join_walked()
        known = {variable: names.get(self._find(key)) for variable, key, _ in self._loops() if key is not None}
        named = {variable: dim for variable, dim in known.items() if dim is not None}
        root = dict.fromkeys(named[variable] for variable, _, outermost in self._loops() if outermost and variable in named)
        return Loops(root=tuple(root), dims=named)

    def returned(self) -> list[str | None]:
        """Returns the names of what the function returns; None for an expression that is no name."""
        last = [n for n in self.node.body if isinstance(n, ast.Return)]
        if not last or last[-1].value is None:
            return []
        return [part.id if isinstance(part, ast.Name) else _base(part) for part in _parts(last[-1].value)]


def _last(node: ast.AST) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def _base(node: ast.AST) -> str | None:
    """Returns the variable that a chain of method calls starts from: `dw` of `dw.sum(0).to(x.dtype)`."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _parts(node: ast.AST) -> list[ast.AST]:
    return list(node.elts) if isinstance(node, ast.Tuple | ast.List) else [node]


def _number(node: ast.AST | None) -> int | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -node.operand.value if isinstance(node.operand.value, int) else None
    return None


def _whole_shape(node: ast.AST) -> str | None:
    """Returns `x` of `x.size()` and `x.shape`."""
    if isinstance(node, ast.Call) and not node.args and _last(node.func) == "size":
        node = node.func
    elif _last(node) != "shape":
        return None
    owner = node.value if isinstance(node, ast.Attribute) else None
    return owner.id if isinstance(owner, ast.Name) else None
