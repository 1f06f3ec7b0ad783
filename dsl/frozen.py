"""A mapping that can be a dictionary key: what sizes, statics and configs are made of."""

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

V = TypeVar("V", covariant=True)


class FrozenMapping(Mapping[str, V], Generic[V]):
    """An immutable, hashable mapping from names; the order of the names is kept but does not tell mappings apart."""

    __slots__ = ("_hash", "_items")

    def __init__(self, items: Mapping[str, V] | None = None, **more: V) -> None:
        self._items: dict[str, Any] = {**(items or {}), **more}
        self._hash: int | None = None

    def __getitem__(self, name: str) -> V:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._items.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrozenMapping):
            return self._items == other._items
        return NotImplemented if not isinstance(other, Mapping) else self._items == dict(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._items!r})"
