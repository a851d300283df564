"""Process groups in an optimizer that can be copied."""

from collections.abc import Mapping, Sequence
from typing import Any


class _Shared(tuple[Any, ...]):
    """Process groups that a copy of the optimizer shares with the original."""

    def __deepcopy__(self, memo: Any) -> "_Shared":
        return self


def shared_groups(groups: Mapping[Any, Sequence[Any]] | None) -> dict[Any, tuple[Any, ...]]:
    """Return the process groups of the parameters that have any, as tuples that copies share."""
    return {param: _Shared(listed) for param, listed in (groups or {}).items() if listed}
