"""What both collections are: tables, their lookups by feature, and their update in the backward pass."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import nn, optim

from keyedopt.reference.embedding.backward import Backward
from keyedopt.reference.embedding.config import EmbeddingConfig, check_tables, output_names
from keyedopt.reference.embedding.inputs import Features, Jagged, check_features
from keyedopt.reference.embedding.lookup import gather
from keyedopt.reference.embedding.optimizer import EmbeddingFusedOptimizer
from keyedopt.reference.fused import FusedOptimizerModule, own


class Table(nn.Module):
    """The rows of one table, and the name under which they are saved: ``<table>.weight``."""

    def __init__(self, config: EmbeddingConfig, device: torch.device | str | None) -> None:
        super().__init__()
        shape = (config.num_embeddings, config.embedding_dim)
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.data_type, device=device))
        with torch.no_grad():
            if config.init_fn is not None:
                config.init_fn(self.weight)
            else:
                self.weight.uniform_(config.get_weight_init_min(), config.get_weight_init_max())


class Lookup(NamedTuple):
    """What has been looked up for one feature in one table: rows (N, D)."""

    table: EmbeddingConfig
    output: str
    bags: Jagged
    rows: torch.Tensor


class FusedCollection(nn.Module, FusedOptimizerModule):
    """Embedding tables that are updated in the backward pass.

    A backward pass, through whatever and how many forwards it goes, is one step: the gradients of all
    lookups of a row are summed, and the row is updated once, with the options that are in
    ``fused_optimizer.param_groups`` at that moment. Nothing is written before everything is computed. Tables
    that the loss does not depend on, and those with ``requires_grad=False``, take no part. In eval mode and
    without grad mode the tables are only read. ``torch.autograd.grad`` updates nothing. A gradient that is
    not finite spoils its own rows and no others.

    Without an optimizer the tables are plain parameters with sparse gradients.

    Args:
        tables: their configurations.
        optimizer_type: the class of the optimizer of all tables: torch's SGD, Adagrad, Adam, AdamW or
            SparseAdam, or one of ours that has a rule.
        optimizer_kwargs: its arguments, with ``error_if_nonfinite`` and, for ``Accumulate…``, the window.
        is_weighted: whether each row that is looked up has a weight.
        device: of the tables.

    Raises:
        ValueError: names the argument that cannot be.
    """

    #: The name of the child that has the tables as its children, as in torchrec.
    children_name = ""

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        optimizer_type: type[optim.Optimizer] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_tables(tables)
        self._configs = [replace(table, init_fn=None) for table in tables]  # a function may not be copied
        self._is_weighted = is_weighted
        self._optim = EmbeddingFusedOptimizer()
        self._backward = Backward(self._optim.update)
        children = {table.name: Table(table, device) for table in tables}
        self.add_module(self.children_name, nn.ModuleDict(children))
        own(self, list(self._weights().values()))
        if optimizer_type is not None:
            self.set_optimizer(optimizer_type, list(self.parameters()), optimizer_kwargs or {})

    @property
    def fused_optimizer(self) -> EmbeddingFusedOptimizer:
        """The optimizer of the tables."""
        return self._optim

    def set_optimizer(
        self,
        optimizer_class: type[optim.Optimizer],
        weights: Sequence[torch.Tensor],
        optimizer_kwargs: Mapping[str, Any],
    ) -> None:
        """Update some of the tables with an optimizer of this class, in the backward pass, from now on.

        Raises:
            ValueError: a weight is none of the tables', one has an optimizer of another class, or an
                argument is out of its range; nothing is changed.
        """
        chosen = {name: table for name, table in self._weights().items() if _among(table, weights)}
        if not chosen or len(chosen) != len(weights):
            raise ValueError("params must be weights of the tables of this module, each once")
        self._optim.use(optimizer_class, chosen, optimizer_kwargs)

    def trains(self, weight: torch.Tensor) -> bool:
        """Whether a table has an optimizer by now."""
        return weight in self._optim.state

    def _weights(self) -> dict[str, torch.Tensor]:
        children = self.get_submodule(self.children_name).named_children()
        return {name: table.get_parameter("weight") for name, table in children}

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
                rows = gather(weights[table.name], leaves[table.name], checked[feature].values)
                found.append(Lookup(table, output, checked[feature], rows))
        return found

    def _leaves(self) -> dict[str, torch.Tensor | None]:
        """Return by what each table is differentiated in this forward, None for one that is only read."""
        weights = self._weights()
        if not (self.training and torch.is_grad_enabled()):
            return dict.fromkeys(weights)
        fused = {name: weight for name, weight in weights.items() if weight in self._optim.state}
        leaves = {**weights, **self._backward.leaves(fused)}
        return {name: leaf if weights[name].requires_grad else None for name, leaf in leaves.items()}

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Take the state along when the module moves to a device."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._optim.follow()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        own(self, list(self._weights().values()))


def _among(tensor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor is other for other in tensors)
