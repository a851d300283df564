"""Collections of embedding tables that are updated in the backward pass."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn, optim
from torch.autograd.graph import register_multi_grad_hook

from keyedopt.reference.embedding.config import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    check_tables,
    output_names,
)
from keyedopt.reference.embedding.inputs import Features, Jagged, check_features
from keyedopt.reference.embedding.lookup import gather, gradient_dtype, pool, stand_in
from keyedopt.reference.embedding.optimizer import EmbeddingFusedOptimizer
from keyedopt.reference.window import Window
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


class FusedCollection(nn.Module, FusedOptimizerModule):
    """What both collections are: tables, their lookups by feature, and their update.

    A backward pass, whatever and how many forwards it goes through, is one step: the gradients of all
    lookups of a row are summed, and the row is updated once, with the options that are in
    ``fused_optimizer.param_groups`` at that moment. Nothing is written before everything is computed. Tables
    that the loss does not depend on, and those with ``requires_grad=False``, take no part. In eval mode and
    without grad mode the tables are only read. ``torch.autograd.grad`` updates nothing.

    Without an optimizer the tables are plain parameters with sparse gradients.

    Args:
        tables: their configurations.
        optimizer_type: the class of the optimizer of all tables: torch's SGD, Adagrad, Adam, AdamW or
            SparseAdam, or one of ours with a rule.
        optimizer_kwargs: its arguments, with ``error_if_nonfinite`` and, for ``Accumulate…``, the window.
        is_weighted: whether each looked-up row has a weight.
        device: of the tables.

    Raises:
        ValueError: names the argument that cannot be.
    """

    #: What the tables are called among the module's children, as in torchrec.
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
        self._configs = list(tables)
        self._is_weighted = is_weighted
        self._optim = EmbeddingFusedOptimizer()
        children = nn.ModuleDict({config.name: Table(config, device) for config in tables})
        self.add_module(self.children_name, children)
        self._forget()
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
        chosen = {
            name: table for name, table in self._weights().items() if any(table is one for one in weights)
        }
        if not chosen or len(chosen) != len(weights):
            raise ValueError("params must be weights of the tables of this module, each once")
        self._optim.use(optimizer_class, chosen, optimizer_kwargs)

    def _weights(self) -> dict[str, torch.Tensor]:
        children = self.get_submodule(self.children_name)
        return {name: table.weight for name, table in children.named_children()}  # type: ignore[misc]

    # --- looking up -------------------------------------------------------------------------------

    def _rows(self, features: Features) -> list[tuple[EmbeddingConfig, str, str, Jagged, torch.Tensor]]:
        """Check all features, then look them up: table, feature, name of the output, bags, rows (N, D)."""
        tables: dict[str, list[int]] = {}
        for config in self._configs:
            for feature in config.feature_names:
                tables.setdefault(feature, []).append(config.num_embeddings)
        checked = check_features(features, tables, self._is_weighted)
        leaves = self._training_leaves()
        weights = self._weights()
        return [
            (
                config,
                feature,
                output,
                checked[feature],
                gather(weights[config.name], leaves[config.name], checked[feature].values),
            )
            for config, outputs in zip(self._configs, output_names(self._configs), strict=True)
            for feature, output in zip(config.feature_names, outputs, strict=True)
        ]

    # --- the backward pass ------------------------------------------------------------------------

    def _training_leaves(self) -> dict[str, torch.Tensor | None]:
        """Return what each table is differentiated by in this forward, None for one that is only read."""
        weights = self._weights()
        if not (self.training and torch.is_grad_enabled()):
            return dict.fromkeys(weights)
        fused = {name: weight for name, weight in weights.items() if weight in self._optim.state}
        if any(not _stands_for(self._leaves.get(name), weight) for name, weight in fused.items()):
            self._make_leaves(fused)
        trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
        return {
            name: self._leaves.get(name, weight) if name in trained else None
            for name, weight in weights.items()
        }

    def _make_leaves(self, fused: Mapping[str, torch.Tensor]) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._leaves = {name: stand_in(weight) for name, weight in fused.items()}
        for leaf in self._leaves.values():
            leaf.register_post_accumulate_grad_hook(_drop_gradient)
        weights = list(fused.values())

        def update(grads: Sequence[torch.Tensor | None]) -> None:
            # once a backward pass, when the gradients of all leaves that it reaches are complete
            pairs = zip(weights, grads, strict=True)
            self._optim.update([(weight, _gradient(grad)) for weight, grad in pairs if grad is not None])

        self._hook = register_multi_grad_hook(list(self._leaves.values()), update)

    def _forget(self) -> None:
        """Begin without leaves: they are made for the weights as they are, in the first forward."""
        self._leaves: dict[str, torch.Tensor] = {}
        self._hook: Any = None
        own(self, list(self._weights().values()))

    # --- moving and copying -----------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Take the state along when the module moves to a device."""
        super()._apply(fn, recurse)
        for weight, entry in self._optim.state.items():
            for value in entry.values():
                if isinstance(value, Window):
                    value.to(weight.device)
                else:
                    value.data = value.data.to(weight.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_leaves": {}, "_hook": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()


class EmbeddingBagCollection(FusedCollection):
    """Tables whose rows are pooled, bag by bag: for each feature and table one output (B, D).

    See `FusedCollection`. Output is float32 at least; an empty bag gives zeros.

    >>> table = EmbeddingBagConfig(num_embeddings=3, embedding_dim=1, name="t", feature_names=["f"],
    ...                            init_fn=nn.init.ones_)
    >>> bags = EmbeddingBagCollection([table], optim.SGD, {"lr": 0.1})
    >>> pooled = bags({"f": (torch.tensor([0, 2, 2]), torch.tensor([0, 1, 3]))})["f"]
    >>> pooled.detach()
    tensor([[1.],
            [2.]])
    >>> pooled.sum().backward()
    >>> bags.embedding_bags["t"].weight.data
    tensor([[0.9000],
            [1.0000],
            [0.8000]])
    """

    children_name = "embedding_bags"

    def forward(self, features: Features) -> dict[str, torch.Tensor]:
        """Look up and pool.

        Args:
            features: for each feature ``(values, offsets)``, with weights ``(values, offsets, weights)``; see
                `Jagged`.

        Returns:
            (B, D) by feature, or by ``feature@table`` where several tables have the feature.

        Raises:
            ValueError: names the feature and what is wrong with it; nothing has been looked up.
        """
        return {
            output: pool(rows, jagged.offsets, jagged.weights, getattr(config, "pooling", PoolingType.SUM))
            for config, _, output, jagged, rows in self._rows(features)
        }


class EmbeddingCollection(FusedCollection):
    """Tables whose rows are not pooled: for each feature and table one output (N, D), a row for each value.

    See `FusedCollection`. Output is float32 at least; weights multiply the rows.
    """

    children_name = "embeddings"

    def forward(self, features: Features) -> dict[str, torch.Tensor]:
        """Look up: as `EmbeddingBagCollection`, without pooling; the offsets of the input are those of the output."""
        return {
            output: rows if jagged.weights is None else rows * jagged.weights.to(rows.dtype)[:, None]
            for _, _, output, jagged, rows in self._rows(features)
        }


def _stands_for(leaf: torch.Tensor | None, weight: torch.Tensor) -> bool:
    return leaf is not None and leaf.device == weight.device and leaf.dtype == gradient_dtype(weight.dtype)


def _gradient(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grad = grad.detach()
    return grad._indices()[0], grad._values()


def _drop_gradient(leaf: torch.Tensor) -> None:
    leaf.grad = None
