"""What both collections are: tables, their lookups by feature, and their update in the backward pass."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn, optim

from keyedopt.fused.backends import CHECKING, check, check_name
from keyedopt.fused.embedding.backward import Backward, Call, LookedUp
from keyedopt.fused.embedding.feature_layout import Places
from keyedopt.fused.embedding.inputs import Bags, check_bags, check_features
from keyedopt.fused.embedding.optimizer import EmbeddingFusedOptimizer
from keyedopt.fused.embedding.owners import claim
from keyedopt.fused.embedding.plain_lookup import look_up_plainly
from keyedopt.fused.embedding.table_groups import Cluster
from keyedopt.fused.embedding.tables import EmbeddingTable, check_tables, slots
from keyedopt.reference.embedding.config import EmbeddingConfig
from keyedopt.reference.embedding.inputs import Features
from keyedopt.reference.fused import FusedOptimizerModule


class FusedCollection(nn.Module, FusedOptimizerModule):
    """Embedding tables that are updated in the backward pass.

    A backward pass, through whatever and how many forwards it goes, is one step: the gradients of all
    lookups of a row are summed, and the row is updated once, with the options that are in
    ``fused_optimizer.param_groups`` at that moment. Nothing is written before everything is checked. Tables
    that the loss does not depend on, and those with ``requires_grad=False``, take no part. In eval mode and
    without grad mode the tables are only read. ``torch.autograd.grad`` updates nothing. A gradient that is
    not finite spoils its own rows and no others.

    Without an optimizer the tables are plain parameters with sparse gradients.

    Args:
        tables: their configurations.
        optimizer_type: the class of the optimizer of all tables: torch's SGD, Adagrad, Adam, AdamW or
            SparseAdam, or one of ours.
        optimizer_kwargs: its arguments, with ``error_if_nonfinite`` and, for ``Accumulate…``, the window.
        is_weighted: whether each row that is looked up has a weight.
        device: of the tables.
        backend: what does the work, see `keyedopt.fused.backends`; ``"auto"`` chooses by device, dtype and
            algorithm.
        rounding_seed: of stochastic rounding of tables in float16 and bfloat16; None rounds to nearest. To
            resume SGD, Adagrad, row-wise Adagrad or LARS bit for bit, keep ``fused_optimizer.rounding_steps``
            beside the checkpoint, and set it.
        strict: whether bad row numbers and offsets are errors at once on every device. On CUDA that waits for
            the device in each forward; without it nothing is read or written by them, every update after them
            is left out, and `check` raises the error.

    Raises:
        ValueError: names the argument that cannot be.
        RuntimeError: the backend is not there; the message says what to install.
    """

    #: The name of the child that has the tables as its children, as in torchrec.
    children_name = ""
    #: Whether bags become one row each.
    pools = True

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        optimizer_type: type[optim.Optimizer] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        backend: str = "auto",
        rounding_seed: int | None = None,
        strict: bool = False,
    ) -> None:
        super().__init__()
        self._strict = strict
        check_tables(tables)
        check_name(backend)
        self._configs = [replace(table, init_fn=None) for table in tables]  # a function may not be copied
        self._slots = slots(self._configs, self.pools)
        self._outputs = [slot.output for slot in self._slots]
        self._is_weighted = is_weighted
        sizes: dict[str, int] = {}
        for table in self._configs:
            for feature in table.feature_names:
                sizes[feature] = min(table.num_embeddings, sizes.get(feature, table.num_embeddings))
        self._sizes = sizes
        self._optim = EmbeddingFusedOptimizer(backend, rounding_seed)
        self._backward = Backward(self._optim.update)
        self._clusters: list[Cluster] = []
        self._layout: list[Places] = []
        self.add_module(
            self.children_name, nn.ModuleDict({table.name: EmbeddingTable(table, device) for table in tables})
        )
        claim(self, list(self._weights().values()))
        if optimizer_type is not None:
            self.set_optimizer(optimizer_type, list(self.parameters()), optimizer_kwargs or {})

    @property
    def fused_optimizer(self) -> EmbeddingFusedOptimizer:
        """The optimizer of the tables."""
        return self._optim

    def set_optimizer(
        self,
        optimizer_class: type[optim.Optimizer],
        weights: Sequence[Tensor],
        optimizer_kwargs: Mapping[str, Any],
    ) -> None:
        """Update some of the tables with an optimizer of this class, in the backward pass, from now on.

        Raises:
            ValueError: a weight is none of the tables', one has an optimizer of another class, or an
                argument is out of its range; nothing is changed.
        """
        chosen = {name: mine for name, mine in self._weights().items() if any(mine is one for one in weights)}
        if not chosen or len(chosen) != len(weights):
            raise ValueError("params must be weights of the tables of this module, each once")
        self._optim.use(optimizer_class, chosen, optimizer_kwargs)
        self._clusters = []

    def trains(self, weight: Tensor) -> bool:
        """Whether a table has an optimizer by now."""
        return any(mine is weight and self._optim.trains(name) for name, mine in self._weights().items())

    def _weights(self) -> dict[str, Tensor]:
        tables = getattr(self, self.children_name)._modules
        return {name: table._parameters["weight"] for name, table in tables.items()}

    def _now(self) -> list[Cluster]:
        """Return the tables as backends take them, put together anew where something was replaced."""
        weights = self._weights()
        groups = self._optim.param_groups
        same = self._clusters and all(
            cluster.fits(weights) and (cluster.plan is None or any(cluster.group is one for one in groups))
            for cluster in self._clusters
        )
        if not same:
            self._clusters = self._optim.clusters(weights)
            self._layout = [Places.of(cluster, self._slots) for cluster in self._clusters]
        return self._clusters

    def look_up(self, features: Features) -> dict[str, Tensor]:
        """Check all features, and only then look them up; see `forward`."""
        checked = check_features(features, self._sizes, self._is_weighted)
        clusters = self._now()
        for places in self._layout:
            places.check_devices(checked)
        checks = all(cluster.backend.name in CHECKING for cluster in clusters)
        if checks and not self.pools:  # then a backend sees no offsets, unless it is told to look at them
            checks = all(hasattr(cluster.backend, "check_offsets") for cluster in clusters)
        gradients = torch.is_grad_enabled()
        trains = self.training and gradients
        plainly = trains and any(
            places.cluster.plan is None and any(weight.requires_grad for weight in places.weights)
            for places in self._layout
        )  # by torch, which does not check
        no_bags = any(offsets.numel() < 2 for _, offsets, _ in checked.values())
        if not checks or plainly or no_bags:
            check_bags(checked, self._sizes)
        call, names = Call(self._backward, []), []
        outputs: dict[str, Any] = dict.fromkeys(self._outputs)
        any_trained = False
        for places in self._layout:
            trained = [trains and weight.requires_grad for weight in places.weights]
            chosen = places
            if places.cluster.plan is None and any(trained):
                for slot, weight, update in zip(places.slots, places.weights, trained, strict=True):
                    if update:
                        bags = checked[slot.feature]
                        outputs[slot.output] = look_up_plainly(weight, bags, self.pools, slot.mean)
                chosen = places.without(trained)
                trained = [False] * len(chosen.slots)
            if chosen.slots:
                call.parts.append((chosen.cluster, chosen.columns(checked, self.pools), trained))
                any_trained = any_trained or any(trained)
                names += chosen.outputs
        any_weights = (
            gradients
            and self._is_weighted
            and any(one.weights is not None and one.weights.requires_grad for _, one, _ in call.lookups())
        )
        try:
            if checks and not self.pools:
                self._check_offsets(checked)
            if any_trained:  # before the lookups, which would fill a device
                call.prepare()
            call.run()
            if self._strict:
                self.check()
        except ValueError:  # of a backend that checks; what it cannot say is which feature it was
            check_bags(checked, self._sizes)
            raise
        found: Sequence[Tensor] = call.outputs
        if any_trained or any_weights:
            leaf = self._backward.leaf(found[0].device) if any_trained else None
            factors_of = [one.weights for _, one, _ in call.lookups()] if self._is_weighted else []
            found = LookedUp.apply(leaf, call, *factors_of)  # type: ignore[no-untyped-call, unused-ignore]
        outputs.update(zip(names, found, strict=True))
        return outputs

    def check(self) -> None:
        """Wait for the devices of the tables, and raise what was wrong with lookups since the last time.

        Raises:
            ValueError: says what was wrong; no table of that device was updated since.
        """
        for cluster in self._now():
            try:
                check(cluster.backend, cluster.device)
            except ValueError:
                for each in self._clusters:
                    each.forget()
                raise

    def _check_offsets(self, checked: Mapping[str, Bags]) -> None:
        for places in self._layout:
            found: Any = places.cluster.backend
            found.check_offsets(places.cluster.tables, places.columns(checked, pools=True))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Take the state along when the module moves to a device."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._optim.follow()
        self._clusters = []
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clusters": [], "_layout": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        claim(self, list(self._weights().values()))
