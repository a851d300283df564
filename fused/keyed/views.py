"""Keys with prefixes, and several mappings seen as one."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, Sequence
from typing import Any


def prepend(name: str, prefix: str) -> str:
    """Put a prefix and a dot in front of a name; either may be empty."""
    return ".".join(part for part in (prefix, name) if part)


def strip(name: Any, prefix: str) -> Any:
    """Undo :func:`prepend`; None for a name without that prefix."""
    if not prefix or name == prefix:
        return "" if prefix else name
    return name[len(prefix) + 1 :] if str(name).startswith(prefix + ".") else None


class Joined(MutableMapping[Any, Any]):
    """Mappings seen as one, whatever they hold at the moment; what is new is put into the last.

    Args:
        parts: returns them, each with the prefix of its keys.
    """

    def __init__(self, parts: Callable[[], Sequence[tuple[str, Mapping[Any, Any]]]]) -> None:
        self._parts: Any = parts

    def _place(self, key: Any) -> tuple[Any, Any]:
        for prefix, part in self._parts():
            name = strip(key, prefix)
            if name is not None and name in part:
                return part, name
        raise KeyError(key)

    def __getitem__(self, key: Any) -> Any:
        part, name = self._place(key)
        return part[name]

    def __setitem__(self, key: Any, value: Any) -> None:
        part, name = self._place(key) if key in self else (self._parts()[-1][1], key)
        part[name] = value

    def __delitem__(self, key: Any) -> None:
        part, name = self._place(key)
        del part[name]

    def __iter__(self) -> Iterator[Any]:
        for prefix, part in self._parts():
            yield from (prepend(name, prefix) for name in part) if prefix else part

    def __len__(self) -> int:
        return sum(len(part) for _, part in self._parts())

    def items(self) -> ItemsView[Any, Any]:
        """Return all pairs; without a search for each key."""
        return _Items(self)

    def __repr__(self) -> str:
        return repr(dict(self.items()))


class _Items(ItemsView[Any, Any]):
    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for prefix, part in self._mapping._parts():  # type: ignore[attr-defined]
            pairs = part.items()
            yield from ((prepend(name, prefix), value) for name, value in pairs) if prefix else pairs
