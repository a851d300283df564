"""Tables that are looked up by feature, and updated in the backward pass."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import optim

from keyedopt.reference.embedding.backward import Backward
from keyedopt.reference.embedding.config import EmbeddingConfig, output_names
from keyedopt.reference.embedding.inputs import check_features
from keyedopt.reference.embedding.jagged import Features, Jagged
from keyedopt.reference.embedding.lookup import gather
from keyedopt.reference.embedding.lookup_operator import LOOK_UP
from keyedopt.reference.embedding.optimizer import EmbeddingFusedOptimizer
from keyedopt.reference.embedding.table_collection import TableCollection


class Lookup(NamedTuple):
    """The rows (N, D) of one table that one feature looks up."""

    table: EmbeddingConfig
    output: str
    bags: Jagged
    rows: torch.Tensor


class FusedCollection(TableCollection):
    """Embedding tables that are updated in the backward pass.

    A backward pass, through any number of forward passes, is one step: the gradients of all lookups of a row
    are summed, and the row is updated once, with the present options in ``fused_optimizer.param_groups``.
    Nothing is written before everything is computed. Tables that the loss does not depend on, and tables with
    ``requires_grad=False``, are not updated. In eval mode and without grad mode the tables are only read.
    ``torch.autograd.grad`` updates nothing. A gradient that is inf or NaN changes only its own rows.

    Without an optimizer the tables are plain parameters with sparse gradients.

    Args:
        tables: their configurations, keyedopt's or torchrec's.
        optimizer_type: the class of the optimizer of all tables: torch's SGD, Adagrad, Adam, AdamW or
            SparseAdam, torchrec's RowWiseAdagrad, or one of keyedopt's.
        optimizer_kwargs: its arguments, with ``error_if_nonfinite`` and, for ``Accumulate…``, the window.
            ``optimizer_state_dtypes={"momentum1": torch.bfloat16}`` stores the momentum of SGD, LarsSGD,
            Adam, LAMB and their variants in bfloat16 or float16; each step rounds momentum once, to nearest.
        is_weighted: whether each row that is looked up has a weight.
        device: of the tables.
        process_group: the ranks with replicas of the tables, which begin with the rows of the first rank. A
            backward pass updates all replicas alike, by the mean over the ranks of their gradients, as
            DistributedDataParallel does. All ranks of the group take part in each backward pass.
        location: where torchrec's collections would place the tables: FBGEMM's `EmbeddingLocation`. HOST
            requires the device "cpu", DEVICE an accelerator; None accepts every device.
        need_indices: whether the `JaggedTensor` of each output of an `EmbeddingCollection` has the row
            numbers as its weights, as in torchrec.

    Raises:
        ValueError: names the argument that is not valid.
    """

    look_up_operator = LOOK_UP

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        optimizer_type: type[optim.Optimizer] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        process_group: Any = None,
        location: Any = None,
        need_indices: bool = False,
    ) -> None:
        optimizer = EmbeddingFusedOptimizer()
        super().__init__(tables, optimizer, is_weighted, device, process_group, location, need_indices)
        self._backward = Backward(self._optim.update)
        self.set_first_optimizer(optimizer_type, optimizer_kwargs)

    def prepare_tracing(self) -> None:
        """Make the stand-ins of the tables before a compiler traces a forward pass."""
        super().prepare_tracing()
        weights = self._weights()
        self._backward.leaves({name: weight for name, weight in weights.items() if self.trains(weight)})

    def traced_leaves(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the stand-in of each table; a tensor without gradient for a table that is only read."""
        stand_ins = self._backward.present()
        pairs = zip(self._configs, weights, strict=True)
        return [stand_ins[table.name] if weight.requires_grad else torch.empty(0) for table, weight in pairs]

    def _look_up(self, features: Features) -> list[Lookup]:
        """Check all features, and only then look them up."""
        sizes: dict[str, list[int]] = {}
        for table in self._configs:
            for feature in table.feature_names:
                sizes.setdefault(feature, []).append(table.num_embeddings)
        checked = check_features(features, sizes, self._is_weighted)
        weights, leaves = self._weights(), self._leaves()
        found = []
        for table, outputs in zip(self._configs, output_names(self._configs), strict=True):
            for feature, output in zip(table.feature_names, outputs, strict=True):
                numbers = checked[feature].values
                rows = gather(weights[table.name], leaves[table.name], numbers, self._optim)
                found.append(Lookup(table, output, checked[feature], rows))
        return found

    def _leaves(self) -> dict[str, torch.Tensor | None]:
        """Return the tensor that gets the gradient of each table, or None if the table is only read."""
        weights = self._weights()
        if not (self.training and torch.is_grad_enabled()):
            return dict.fromkeys(weights)
        self.check_replication()
        fused = {name: weight for name, weight in weights.items() if weight in self._optim.state}
        leaves = {**weights, **self._backward.leaves(fused)}
        return {name: leaf if weights[name].requires_grad else None for name, leaf in leaves.items()}
