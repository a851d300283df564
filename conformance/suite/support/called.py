"""A public class that is called through a function, so that a case gets more than it asks for."""

from collections.abc import Mapping
from typing import Any

from keyedopt.conformance.suite.support.described import Described


class Called:
    """Stands for a public class: it is called through a function, and otherwise is the class."""

    def __init__(self, kind: Any, make: Any) -> None:
        self._kind, self._make = kind, make
        self._class = kind.kind if isinstance(kind, Described) else kind

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the function with the class."""
        return self._make(self._kind, *args, **options)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance(kind, Described) and isinstance(kind, type)
        return type(self._kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._class)

    def __subclasscheck__(self, other: Any) -> bool:
        return issubclass(other, self._class)

    def __mro_entries__(self, bases: Any) -> tuple[Any, ...]:
        return (self._class,)


def uncalled(value: Any) -> Any:
    """Return the class that a value stands for; any other value as it is."""
    return value._class if type(value) is Called else value


def each(change: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options whose values were changed by a function."""
    return {name: change(value) for name, value in options.items()}
