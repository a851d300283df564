"""Embedding tables in the memory of the host, with a cache of rows on a device."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn, optim

from keyedopt.reference.embedding.cached_optimizer import CachedOptimizer, ForwardRows, check_rows
from keyedopt.reference.embedding.config import EmbeddingConfig, output_names, own_configs
from keyedopt.reference.embedding.host_table import HostTable
from keyedopt.reference.embedding.inputs import check_features
from keyedopt.reference.embedding.jagged import Features, is_keyed, jagged_tensors, keyed_tensor
from keyedopt.reference.embedding.lookup import uncompiled
from keyedopt.reference.embedding.row_cache import places_by_table
from keyedopt.reference.embedding.table_collection import TableCollection
from keyedopt.reference.embedding.variable_batch import bags_of_rows, join
from keyedopt.reference.fused import FusedOptimizerModule, own


class CachedEmbeddings(nn.Module, FusedOptimizerModule):
    """Tables larger than the memory of a device: on the host, with a cache of rows on the device.

    A forward pass copies missing rows to the device. The rows that were used longest ago are evicted, and
    written back to the host if they were updated; rows that wait for an update are never evicted. Results
    equal those of the same collection with all rows on the device, except where rounding depends on the place
    of a row: in some of torch's operators, and in the draws of stochastic rounding.

    ``state_dict`` and ``load_state_dict`` of module and optimizer, and reading a table's ``weight`` from
    its child module, write newer rows back first. Call `flush` before you read or write tensors that you
    have kept, or got from ``parameters()``. Rows are copied to CUDA through pinned memory. The tables are
    not pinned: torch rounds the size of pinned memory up to a power of 2. Each forward pass synchronizes.

    Args:
        collection_class: `EmbeddingBagCollection` or `EmbeddingCollection`, of reference or fused.
        tables: their configurations, keyedopt's or torchrec's.
        cached_rows: how many rows the device holds, of each table or by the name of the table: at least those
            of one batch, and of all batches that wait for a backward pass or, with a joint norm, a step.
        optimizer_type: the class of the optimizer of all tables.
        optimizer_kwargs: its arguments. Windows of accumulation, and ``rows="all"``, are not supported.
        is_weighted: whether each row that is looked up has a weight.
        device: of the cache, and of inputs and outputs.
        process_group: None, because cached tables have no replicas.
        location: as in the collection.
        need_indices: as in the collection.

    Raises:
        ValueError: names the argument that is not valid.

    >>> import torch
    >>> from keyedopt.reference import CachedEmbeddings, EmbeddingBagCollection, EmbeddingBagConfig
    >>> table = EmbeddingBagConfig(1000, 1, name="t", feature_names=["f"], init_fn=torch.nn.init.ones_)
    >>> bags = CachedEmbeddings(EmbeddingBagCollection, [table], 10, torch.optim.SGD, {"lr": 0.1})
    >>> bags({"f": (torch.tensor([0, 999]), torch.tensor([0, 2]))})["f"].sum().backward()
    >>> bags.embedding_bags["t"].weight.data[[0, 1, 999]]
    tensor([[0.9000],
            [1.0000],
            [0.9000]])
    """

    def __init__(
        self,
        collection_class: type[Any],
        tables: Sequence[EmbeddingConfig],
        cached_rows: int | Mapping[str, int],
        optimizer_type: type[optim.Optimizer],
        optimizer_kwargs: Mapping[str, Any] | None = None,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        process_group: None = None,
        location: Any = None,
        need_indices: bool = False,
    ) -> None:
        super().__init__()
        if not (isinstance(collection_class, type) and issubclass(collection_class, TableCollection)):
            raise ValueError(f"collection_class must be a collection of keyedopt, not {collection_class!r}")
        if process_group is not None:
            raise ValueError("process_group must be None: cached tables have no replicas")
        tables = own_configs(tables)
        places = places_by_table(tables, cached_rows)
        self._configs = [replace(table, init_fn=None) for table in tables]
        self._is_weighted = is_weighted
        self._outputs = output_names(tables)
        self._widths: dict[str, int] = {}
        self._sizes: dict[str, list[int]] = {}
        for table, outputs in zip(tables, self._outputs, strict=True):
            self._widths.update(dict.fromkeys(outputs, table.embedding_dim))
            for feature in table.feature_names:
                self._sizes.setdefault(feature, []).append(table.num_embeddings)
        on_device = [
            replace(
                table, num_embeddings=places[table.name], feature_names=list(outputs), init_fn=nn.init.zeros_
            )
            for table, outputs in zip(tables, self._outputs, strict=True)
        ]
        make: Any = collection_class
        more = {"location": location, "need_indices": need_indices}
        inner = make(on_device, optimizer_type, optimizer_kwargs, is_weighted, device, **more)
        #: The collection of the rows on the device. A tuple, so that torch does not register it as a child.
        self._collection = (inner,)
        hosts = {table.name: HostTable(table, "cpu") for table in tables}
        self.add_module(inner.children_name, nn.ModuleDict(hosts))
        self._optim = CachedOptimizer(inner.fused_optimizer, hosts)
        inner._backward = type(inner._backward)(self._optim.update)
        own(self, list(self.parameters()))

    @property
    def fused_optimizer(self) -> CachedOptimizer:
        """The optimizer of the tables."""
        return self._optim

    def set_optimizer(
        self,
        optimizer_class: type[optim.Optimizer],
        weights: Sequence[Tensor],
        optimizer_kwargs: Mapping[str, Any],
    ) -> None:
        """Update the tables `weights` with other `optimizer_kwargs` of their `optimizer_class`, from now on.

        Raises:
            ValueError: a weight is not a table of this module, the class is another one, or an argument is
                out of range; nothing is changed.
        """
        check_rows(optimizer_kwargs)
        on_device = self._optim.on_device(weights)
        self._collection[0].set_optimizer(optimizer_class, on_device, optimizer_kwargs)
        self._optim.show_groups()

    def trains(self, weight: Tensor) -> bool:
        """Return whether `weight` is one of the tables: each has an optimizer."""
        return any(weight is host for host in self._optim.params.values())

    def flush(self) -> None:
        """Write the newer rows of all tables, and of their state, back to the host."""
        self._optim.flush()

    def explain(self) -> str:
        """Return how many rows of each table the device holds, and how many came from the host."""
        return self._optim.explain()

    @uncompiled
    def forward(self, features: Features) -> Any:
        """Look up, as the collection does.

        Args:
            features: as for the collection, on the device of the cache.

        Returns:
            What the collection returns.

        Raises:
            ValueError: names the feature and what is wrong with it, or says that more rows are needed at once
                than the device holds.
            RuntimeError: a table was written on the host while newer rows were on the device.
        """
        checked = check_features(features, self._sizes, self._is_weighted)
        keyed, pools = is_keyed(features), self._collection[0].pools
        features_looked_up = [feature for table in self._configs for feature in table.feature_names]
        bags = bags_of_rows(features, features_looked_up) if keyed and pools else None
        inputs, used = {}, []
        for table, names in zip(self._configs, self._outputs, strict=True):
            cache = self._optim.caches[table.name]
            rows = torch.unique(
                torch.cat([self._values(checked, feature) for feature in table.feature_names])
            )
            places = cache.load(rows, self._optim.places_in_use(cache))
            used.append((cache, rows, places, cache.changes))
            for feature, output in zip(table.feature_names, names, strict=True):
                found = cache.places(checked[feature].values.long())
                inputs[output] = checked[feature]._replace(values=found)
        inner = self._collection[0]
        for key, host in self._optim.params.items():
            inner.fused_optimizer.params[key].requires_grad_(host.requires_grad)
        outputs = inner(inputs)
        trained = [output for output in outputs.values() if output.requires_grad]
        if trained:
            self._optim.watch(ForwardRows(used), trained)
        if not keyed:
            return outputs
        if pools:
            return keyed_tensor(features, self._widths, join(list(outputs.values()), bags))
        offsets = [inputs[output].offsets for output in outputs]
        values = [checked[feature].values for feature in features_looked_up] if inner.need_indices() else None
        return jagged_tensors(features, outputs, offsets, values)

    def _values(self, features: Mapping[str, Any], name: str) -> Tensor:
        values: Tensor = features[name].values
        device = self._collection[0].device
        if values.device != device:
            raise ValueError(
                f"values of feature {name!r} must be where the cache is, on {device}, not on {values.device}"
            )
        return values.long()

    def train(self, mode: bool = True) -> Self:
        """Set training or eval mode by `mode`, as `torch.nn.Module` does, and return this module."""
        self._collection[0].train(mode)
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Leave the tables on the host and the cache where it is.

        Raises:
            RuntimeError: the device or dtype would be another.
        """
        for weight in self._collection[0].parameters():
            wanted = fn(weight.detach()[:0])
            if (wanted.device, wanted.dtype) != (weight.device, weight.dtype):
                raise RuntimeError(
                    f"the cache stays on {weight.device} in {weight.dtype}: make new CachedEmbeddings for "
                    f"{wanted.device} in {wanted.dtype}, and load the state dicts of these"
                )
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        own(self, list(self._optim.params.values()))
