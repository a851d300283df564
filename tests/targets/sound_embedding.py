"""Sound embedding modules: how a row is computed depends on its place among those of a step.

Rows come last first; every third is computed in float64 and rounded once, the others in their own dtype. What
`state_dict` of the optimizer shows is in an order of its own, and errors are of a kind of their own.
"""

from collections import OrderedDict
from typing import Any

import torch

from keyedopt import reference
from keyedopt.reference.embedding import EmbeddingFusedOptimizer
from keyedopt.reference.embedding.keys import COUNTING, live
from keyedopt.reference.embedding.table_optimizers import algorithm


class RefusedError(ValueError):
    """What cannot be."""


class Optimizer(EmbeddingFusedOptimizer):
    def _compute(self, update: Any) -> None:
        update.rows, update.grads = update.rows.flip(0), update.grads.flip(0)
        super()._compute(update)
        name, optimizer = self._names[update.weight], self._table_optimizers[update.weight]
        entry = self.state[update.weight]
        state = live(entry, algorithm(optimizer), name)
        if algorithm(optimizer) in COUNTING:
            state.setdefault("step", entry.get(f"{name}.iter", torch.zeros(1))[0] + 1)
        rule, _ = optimizer.rule(self._group(update.weight), state, False)
        old = [tensor[update.rows] for tensor in update.targets]
        wide = [one.double() if one.is_floating_point() else one for one in old]
        exact = rule(wide[0], update.grads.double(), *wide[1:])
        even = torch.arange(len(update.rows)) % 3 == 0
        mixed = []
        for one, other in zip(update.new, exact, strict=True):
            place = even.reshape(-1, *[1] * (one.ndim - 1))
            mixed.append(torch.where(place, other.to(one.dtype), one))
        update.new = mixed

    def _save(self) -> Any:
        saved = super()._save()
        saved["state"] = OrderedDict(
            (key, OrderedDict(reversed(list(entry.items()))))
            for key, entry in reversed(list(saved["state"].items()))
        )
        return saved

    def _prepare_load(self, state_dict: Any) -> Any:
        try:
            return super()._prepare_load(state_dict)
        except ValueError as error:
            raise RefusedError(f"No. {error}") from None


class EmbeddingBagCollection(reference.EmbeddingBagCollection):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._optim.__class__ = Optimizer


class EmbeddingCollection(reference.EmbeddingCollection):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._optim.__class__ = Optimizer
