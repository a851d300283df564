"""The interface for a faster implementation: show, pair and fill the state of many parameters at once.

Each keyed optimizer with state of its own has a `Bulk` as ``bulk``. A subclass in another package assigns a
faster `Bulk` to this class attribute. Wrappers and combinations use the ``bulk`` of the optimizers inside.
There is no global registry, so importing a faster package never changes how the optimizers of this package
behave.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from keyedopt.reference.keyed.values import extract, layout


class Bulk:
    """Operations on the state of many parameters, one parameter at a time.

    A faster implementation returns the same results, and may call these methods for types of state that it
    does not support.
    """

    def show(self, entries: Collection[Mapping[Any, Any]]) -> list[dict[Any, Any]]:
        """Return each entry as it is saved: live tensors, and stateful objects as their state."""
        return [extract(entry) for entry in entries]

    def layouts(self, entries: Collection[Mapping[Any, Any]]) -> list[Any]:
        """Return the keys of each entry, in a form that compares equal while the keys stay the same."""
        return [layout(entry) for entry in entries]

    def pair(self, live: dict[str, Any], new: Mapping[Any, Any]) -> tuple[list[Any], list[Any]] | None:
        """Return all live values, and the new value for each, if all entries have the same keys.

        The values are compared later, by `match` or `fill_exact`. None, which this implementation returns
        always, has every entry checked at once.
        """
        return None

    def match(self, live: list[Any], new: list[Any]) -> bool:
        """Return whether all values are tensors, and each new tensor can be copied exactly."""
        return False

    def fill_exact(self, live: list[Any], new: list[Any]) -> bool:
        """Compare and fill in one pass if all values match; otherwise write nothing and return False."""
        return False

    def fill(self, live: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        """Copy new tensors into live ones, which may share memory with any of the new ones."""
        # State dicts alias the live state and may be re-keyed, so every source is copied before the
        # first write, unless the source is the tensor to fill.
        pairs = zip(live, new, strict=True)
        copies = [(tensor, source.detach().clone()) for tensor, source in pairs if source is not tensor]
        with torch.no_grad():  # not into tensor.detach(): the indices of a sparse tensor would stay
            for tensor, source in copies:
                tensor.copy_(source)


#: The default: one parameter after the other.
ONE_BY_ONE = Bulk()
