"""Tables in a module, and their optimizer: the base of the collections in `reference` and `fused`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from keyedopt.reference.embedding.config import EmbeddingConfig, own_configs
from keyedopt.reference.embedding.location import check_location
from keyedopt.reference.embedding.optimizer_base import EmbeddingOptimizerBase
from keyedopt.reference.embedding.quantization import refuse_quantization
from keyedopt.reference.embedding.replicas import Replicas, check_replication
from keyedopt.reference.embedding.tracing import TracedLookups
from keyedopt.reference.fused import FusedOptimizerModule, disown, own


class Table(nn.Module):
    """The rows of one table, and the name under which they are saved: ``<table>.weight``."""

    #: Allocates the rows.
    empty: ClassVar[Callable[..., torch.Tensor]] = staticmethod(torch.empty)

    def __init__(self, config: EmbeddingConfig, device: torch.device | str | None) -> None:
        super().__init__()
        shape = (config.num_embeddings, config.embedding_dim)
        self.weight = nn.Parameter(self.empty(shape, dtype=config.data_type, device=device))
        self._bounds = config.get_weight_init_min(), config.get_weight_init_max()
        # A function may not be copied: it is kept only as long as the rows have no memory.
        self._init_fn = config.init_fn
        self.fill()

    def fill(self) -> None:
        """Give the rows their initial values; on the device "meta" do nothing."""
        if self.weight.is_meta:
            return
        with torch.no_grad():
            if self._init_fn is not None:
                self._init_fn(self.weight)
            else:
                self.weight.uniform_(*self._bounds)
        self._init_fn = None


class TableCollection(TracedLookups, FusedOptimizerModule):
    """Embedding tables, and the optimizer that updates them in the backward pass; no lookups.

    Args:
        tables: their configurations, keyedopt's or torchrec's.
        optimizer: has no tables yet; `set_optimizer` adds them.
        is_weighted: whether each row that is looked up has a weight.
        device: of the tables.
        process_group: ranks with replicas of the tables; None if this rank has the only one.
        location: FBGEMM's `EmbeddingLocation`, or None; see `check_location`.
        need_indices: whether outputs without pooling have the row numbers beside the rows.

    Raises:
        ValueError: names the argument that is not valid.
    """

    #: The class of these children.
    table_class = Table

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        optimizer: EmbeddingOptimizerBase,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        process_group: Any = None,
        location: Any = None,
        need_indices: bool = False,
    ) -> None:
        super().__init__()
        check_location(location, device)
        if need_indices and self.pools:
            raise ValueError(
                f"need_indices=True is not supported by {type(self).__name__}: its bags are pooled"
            )
        tables = own_configs(tables)
        self._configs = [replace(table, init_fn=None) for table in tables]  # a function may not be copied
        self._is_weighted = is_weighted
        self._need_indices = need_indices
        self._optim: Any = optimizer
        children = {table.name: self.table_class(table, device) for table in tables}
        self.add_module(self.children_name, nn.ModuleDict(children))
        own(self, list(self._weights().values()))
        if process_group is not None:
            self._optim.replicas = Replicas(process_group)
            self._make_replicas_equal()

    def reset_parameters(self) -> None:
        """Fill all tables with initial values, as torchrec's collections do after `to_empty`.

        The function `init_fn` of a configuration is called if the table was made on the device "meta" and is
        filled for the first time; otherwise values are drawn uniformly from the bounds. State is unchanged.
        With a process group all ranks take part, and get the rows of the first rank.
        """
        for table in self.get_submodule(self.children_name).children():
            table.fill()  # type: ignore[operator]  # the children are tables
        self._make_replicas_equal()

    def _make_replicas_equal(self) -> None:
        """Give the replicas the rows of the first rank, if there are replicas and the tables have memory."""
        if self._optim.replicas is not None and self.device.type != "meta":
            self._optim.replicas.make_equal(self._weights().values())

    def need_indices(self) -> bool:
        """Return whether outputs without pooling have the row numbers beside the rows."""
        return self._need_indices

    def table_configs(self) -> Sequence[EmbeddingConfig]:
        """Return the configurations of the tables."""
        return self._configs

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "qconfig":
            refuse_quantization(sys._getframe(1).f_locals.get("qconfig_dict"))
        super().__setattr__(name, value)

    def is_weighted(self) -> bool:
        """Return whether each row that is looked up has a weight."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """The device of the first table."""
        return next(iter(self._weights().values())).device

    @property
    def fused_optimizer(self) -> Any:
        """The optimizer of the tables."""
        return self._optim

    def set_optimizer(
        self,
        optimizer_class: type[optim.Optimizer],
        weights: Sequence[torch.Tensor],
        optimizer_kwargs: Mapping[str, Any],
    ) -> None:
        """Update some of the tables with an optimizer of this class, in the backward pass, from now on.

        Args:
            optimizer_class: the class of the optimizer, as ``optimizer_type`` of the collection.
            weights: parameters of tables of this collection, each once.
            optimizer_kwargs: the arguments of the optimizer, except its parameters.

        Raises:
            ValueError: a weight is not a table of this module, a table has an optimizer of another class, or
                an argument is out of range; nothing is changed.
        """
        chosen = {name: table for name, table in self._weights().items() if _among(table, weights)}
        if not chosen or len(chosen) != len(weights):
            raise ValueError("params must be weights of the tables of this module, each once")
        self._optim.use(optimizer_class, chosen, optimizer_kwargs)
        self.prepare_tracing()

    def set_first_optimizer(
        self, optimizer_class: type[optim.Optimizer] | None, optimizer_kwargs: Mapping[str, Any] | None
    ) -> None:
        """Update all tables with an optimizer of this class; leave them plain parameters without a class."""
        if optimizer_class is not None:
            self.set_optimizer(optimizer_class, list(self.parameters()), optimizer_kwargs or {})
        else:
            self.prepare_tracing()

    def trains(self, weight: torch.Tensor) -> bool:
        """Return whether a table has an optimizer."""
        return weight in self._optim.state

    def check_replication(self) -> None:
        """Raise RuntimeError inside DistributedDataParallel if it reduces tables that have an optimizer."""
        if DistributedDataParallel._active_ddp_module is not None:
            trained = {name: weight for name, weight in self._weights().items() if self.trains(weight)}
            check_replication(trained, self._optim.replicas is not None)

    def _weights(self) -> dict[str, torch.Tensor]:
        children = self.get_submodule(self.children_name).named_children()
        return {name: table.get_parameter("weight") for name, table in children}

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move the state with the module to a device; from the device "meta" it begins anew."""
        before = self._weights()
        disown(before.values())
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            own(self, list(self._weights().values()))
        self._optim.move_state({before[name]: weight for name, weight in self._weights().items()})
        self.prepare_tracing()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        own(self, list(self._weights().values()))
        self.prepare_tracing()


def _among(tensor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor is other for other in tensors)
