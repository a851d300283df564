"""Live views over the parameters and the state of several optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

_ABSENT: Any = object()


def prepend_key(name: str, prefix: str) -> str:
    """Return a parameter's key with the prefix of its optimizer: ``prefix.name``."""
    return f"{prefix}.{name}" if name and prefix else name or prefix


def strip_key(name: Any, prefix: str) -> Any:
    """Return a key without the prefix; `_ABSENT` if the key does not have the prefix."""
    if not prefix:
        return name
    if name == prefix:
        return ""
    return name[len(prefix) + 1 :] if str(name).startswith(f"{prefix}.") else _ABSENT


def strip_keys(names: Iterable[str], prefix: str) -> list[str]:
    """Return those keys that have the prefix, without the prefix."""
    stripped = (strip_key(name, prefix) for name in names)
    return [name for name in stripped if name is not _ABSENT]


class JoinedView(MutableMapping[Any, Any]):
    """A live view of several mappings as one: each use looks the mappings up again.

    Args:
        parts: returns the current mappings, each with the prefix of its keys. A new key is written to the
            last mapping.
    """

    def __init__(self, parts: Callable[[], Sequence[tuple[str, MutableMapping[Any, Any]]]]) -> None:
        self._parts = parts

    def _find(self, key: Any) -> tuple[MutableMapping[Any, Any], Any] | None:
        for prefix, mapping in self._parts():
            inner = strip_key(key, prefix)
            if inner is not _ABSENT and inner in mapping:
                return mapping, inner
        return None

    def __getitem__(self, key: Any) -> Any:
        found = self._find(key)
        if found is None:
            raise KeyError(key)
        return found[0][found[1]]

    def __setitem__(self, key: Any, value: Any) -> None:
        mapping, inner = self._find(key) or (self._parts()[-1][1], key)
        mapping[inner] = value

    def __delitem__(self, key: Any) -> None:
        found = self._find(key)
        if found is None:
            raise KeyError(key)
        del found[0][found[1]]

    def __iter__(self) -> Iterator[Any]:
        for prefix, mapping in self._parts():
            yield from (prepend_key(key, prefix) if prefix else key for key in mapping)

    def __len__(self) -> int:
        return sum(len(mapping) for _, mapping in self._parts())

    def __repr__(self) -> str:
        return repr(dict(self))
