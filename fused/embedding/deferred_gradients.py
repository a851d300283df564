"""Gradients of tables that wait for a step, as those of dense parameters do in ``.grad``."""

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Lookup
from keyedopt.fused.embedding.backward import Given
from keyedopt.fused.embedding.table_groups import Cluster
from keyedopt.fused.embedding.update import Plan, coalesce


@dataclass
class Waiting:
    """The summed gradient of a table.

    Args:
        cluster, table: where the table was in the backward pass.
        rows: distinct, ascending, (U,); the last of them may be −1, which is none.
        grads: (U, D).
    """

    cluster: Cluster
    table: int
    rows: Tensor
    grads: Tensor


class Held:
    """What the backward passes since the last step have given, each row of a table once, and for whom.

    A copy, as of ``.grad``, has no gradients. Who asked for them is referred to weakly, so when nobody who
    could scale them is left, nothing is held any more.
    """

    def __init__(self) -> None:
        self._tables: dict[str, Waiting] = {}
        self._asking: list[weakref.ref[Any]] = []
        self._due: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._tables)

    def wanted(self) -> bool:
        """Whether gradients are to be held."""
        return any(one() is not None for one in self._asking)

    def ask(self, clip: Any) -> None:
        """Hold gradients for a bound."""
        self._asking.append(weakref.ref(clip))

    def keep(self, inside: Sequence[Any]) -> None:
        """Forget all who asked but for these."""
        self._asking = [known for known in self._asking if any(known() is one for one in inside)]

    def clip(self, clip: Any) -> None:
        """Apply a bound, unless that is done."""
        if any(clip is one for one in self._due):
            self._due = [one for one in self._due if one is not clip]
            clip.apply([one.grads for one in self._tables.values()])

    def drop(self) -> None:
        """Forget the gradients."""
        self._tables, self._due = {}, []

    def names(self) -> Collection[str]:
        """Return the tables that have a gradient."""
        return self._tables.keys()

    def gradients(self) -> list[tuple[str, Tensor]]:
        """Return tables and gradients (U, D), to be changed in place."""
        return [(name, one.grads) for name, one in self._tables.items()]

    def add(self, plan: Plan, clips: Sequence[Any]) -> None:
        """Add what a backward pass has summed up; these bounds are to be applied before it is used."""
        self._due = list(clips)
        for work in plan.works:
            for one in work.sums or ():
                name = work.cluster.names[one.table]
                rows, grads = one.rows, one.grads
                had = self._tables.get(name)
                if had is not None:
                    both = [
                        Lookup(one.table, had.rows.to(rows.device), grad=had.grads.to(grads), holes=True),
                        Lookup(one.table, rows, grad=grads, holes=True),
                    ]
                    (total,) = coalesce(work.backend, work.cluster.tables, both, exact=False)
                    rows, grads = total.rows, total.grads
                self._tables[name] = Waiting(work.cluster, one.table, rows, grads)

    def given(self, weights: Mapping[str, Tensor]) -> list[Given]:
        """Return it as lookups, each of distinct rows of a table, in the clusters of the backward pass.

        It is moved to where the tables are now, in the dtype that an update of them takes, and bounded.
        """
        for name, one in self._tables.items():
            weight = weights[name]
            one.rows = one.rows.to(weight.device)
            one.grads = one.grads.to(weight.device, torch.promote_types(weight.dtype, torch.float32))
        for clip in list(self._due):
            self.clip(clip)
        tables = self._tables.values()
        return [(one.cluster, [Lookup(one.table, one.rows, grad=one.grads)]) for one in tables]

    def __getstate__(self) -> list[Any]:
        asking = [one() for one in self._asking]
        return [clip for clip in asking if clip is not None]

    def __setstate__(self, clips: list[Any]) -> None:
        self.__init__()  # type: ignore[misc]
        for clip in clips:
            self.ask(clip)
