"""Gradients of tables that are deferred to ``step``, in the table groups of their backward pass."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from keyedopt.fused.backends.interface import Lookup
from keyedopt.fused.embedding.backward import GroupLookups
from keyedopt.fused.embedding.table_groups import TableGroup
from keyedopt.fused.embedding.update import PlannedStep, coalesce
from keyedopt.reference.embedding.deferred_gradients import DeferredGradients


class GroupedGradients(DeferredGradients):
    """Deferred gradients with the table group of each table, and the index in it; rows may be padded."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[Tensor, tuple[TableGroup, int]] = {}

    def clear(self) -> None:
        """Drop the gradients."""
        super().clear()
        self._groups = {}

    def add_planned(self, step: PlannedStep, clips: Sequence[Any]) -> None:
        """Add the sums of a planned step; `clips` are applied to them before they are used."""
        sums = []
        for update in step.updates:
            for one in update.sums or ():
                weight = update.group.tables[one.table].weight
                rows, grads = one.rows, one.grads
                if weight in self.sums:
                    earlier, earlier_grads = self.sums[weight]
                    both = [
                        Lookup(
                            one.table, earlier.to(rows.device), grad=earlier_grads.to(grads), padding=True
                        ),
                        Lookup(one.table, rows, grad=grads, padding=True),
                    ]
                    (total,) = coalesce(update.backend, update.group.tables, both, exact=False)
                    rows, grads = total.rows, total.grads
                sums.append((weight, (rows, grads)))
                self._groups[weight] = update.group, one.table
        self.add(sums, clips)

    def replaced(self, moved: Mapping[Tensor, Tensor]) -> None:
        """Move gradients to the parameters that replaced others: ``moved[old]`` is the new one."""
        super().replaced(moved)
        self._groups = {moved[weight]: place for weight, place in self._groups.items()}

    def lookups(self) -> list[GroupLookups]:
        """Return the clipped gradients as lookups of distinct rows, in the groups of the backward pass."""
        found: list[GroupLookups] = []
        for weight, (rows, grads) in self.clipped():
            group, table = self._groups[weight]
            found.append((group, [Lookup(table, rows, grad=grads)]))
        return found
