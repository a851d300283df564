"""Process groups that an optimizer keeps."""

from collections.abc import Mapping, Sequence
from typing import Any


class _Shared(tuple[Any, ...]):
    """Process groups, which a copy of the optimizer shares with the original."""

    def __deepcopy__(self, memo: Any) -> "_Shared":
        return self


def shared_groups(groups: Mapping[Any, Sequence[Any]] | None) -> dict[Any, tuple[Any, ...]]:
    """Return the process groups of those parameters that have some, for an optimizer that may be copied."""
    return {param: _Shared(some) for param, some in (groups or {}).items() if some}
