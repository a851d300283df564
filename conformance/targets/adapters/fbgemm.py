"""FBGEMM's table-batched embeddings (TBE) under the names of the surface.

Thin on purpose: configurations become TBE's arguments, features its indices and offsets, and the fused
optimizer shows TBE's own tensors and calls its own setters. Nothing is checked, made up for or repaired, so
what a case sees is what FBGEMM does. Keys are those that torchrec gives to TBE's state.
"""

import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import nn


class PoolingType(enum.Enum):
    """How the rows of a bag become one."""

    SUM = PoolingMode.SUM
    MEAN = PoolingMode.MEAN


@dataclass
class EmbeddingConfig:
    """One table."""

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: torch.dtype = torch.float32
    feature_names: list[str] = field(default_factory=list)
    init_fn: Callable[[torch.Tensor], Any] | None = None


@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    """One table whose rows are pooled."""

    pooling: PoolingType = PoolingType.SUM


class RowWiseAdagrad(torch.optim.Optimizer):
    """A name for TBE's row-wise Adagrad; it exists only fused."""


OPTIMIZERS = {
    torch.optim.SGD: EmbOptimType.EXACT_SGD,
    torch.optim.Adagrad: EmbOptimType.EXACT_ADAGRAD,
    RowWiseAdagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
OPTIONS = {"lr": "learning_rate"}
DECAY = {"none": WeightDecayMode.NONE, "l2": WeightDecayMode.L2, "decoupled": WeightDecayMode.DECOUPLE}
DTYPES = {torch.float32: SparseType.FP32, torch.float16: SparseType.FP16}


class _Group(dict[str, Any]):
    """A group whose rate is TBE's, whenever it is set."""

    def __init__(self, tbe: Any, params: list[torch.Tensor]) -> None:
        super().__init__(params=params, lr=tbe.get_learning_rate())
        self._tbe = tbe

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key == "lr":
            self._tbe.set_learning_rate(float(value))


class EmbeddingFusedOptimizer(torch.optim.Optimizer):
    """TBE's state by torchrec's keys."""

    def __init__(self, tbe: Any, names: Sequence[str]) -> None:
        self._tbe, self._names = tbe, list(names)
        super().__init__(tbe.split_embedding_weights(), {"lr": tbe.get_learning_rate()})
        self.param_groups = [_Group(tbe, tbe.split_embedding_weights())]

    @property
    def params(self) -> dict[str, torch.Tensor]:
        """TBE's tables, live: views, which TBE makes anew at each call."""
        weights = self._tbe.split_embedding_weights()
        return {f"{name}.weight": weight for name, weight in zip(self._names, weights, strict=True)}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()  # torch leaves all but state and groups out

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Set the rate, as torchrec does; the update was done in the backward pass."""
        self._tbe.set_learning_rate(float(self.param_groups[0]["lr"]))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the rate, as torchrec does."""
        self.step()

    def state_dict(self) -> dict[str, Any]:
        """Return TBE's state, live, by torchrec's keys."""
        state = {}
        # of exact SGD it has no entries, where others have one a table
        entries: list[dict[str, torch.Tensor]] = self._tbe.get_optimizer_state() or [{} for _ in self._names]
        for name, entry in zip(self._names, entries, strict=True):
            keys = ["momentum1", *list(entry)[1:]][: len(entry)]
            named = zip(keys, entry.values(), strict=True)
            state[f"{name}.weight"] = {f"{name}.{key}": value for key, value in named}
        return {"state": state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Fill TBE's tensors."""
        for key, entry in self.state_dict()["state"].items():
            for name, tensor in entry.items():
                tensor.copy_(state_dict["state"][key][name])


class EmbeddingBagCollection(nn.Module):
    """TBE as a collection; the tables are pooled alike, and every feature has as many bags."""

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        optimizer_type: type[torch.optim.Optimizer],
        optimizer_kwargs: Mapping[str, Any] | None = None,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        kwargs = {OPTIONS.get(name, name): value for name, value in (optimizer_kwargs or {}).items()}
        if "decay" in kwargs:
            kwargs["weight_decay_mode"] = DECAY[kwargs.pop("decay")]
        on = torch.device(device or "cpu")
        place = EmbeddingLocation.DEVICE if on.type == "cuda" else EmbeddingLocation.HOST
        compute = ComputeDevice.CUDA if on.type == "cuda" else ComputeDevice.CPU
        self._tables, self._weighted = list(tables), is_weighted
        self._tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(table.num_embeddings, table.embedding_dim, place, compute) for table in tables],
            feature_table_map=[number for number, table in enumerate(tables) for _ in table.feature_names],
            pooling_mode=getattr(tables[0], "pooling", PoolingType.SUM).value,
            weights_precision=DTYPES[tables[0].data_type],
            optimizer=OPTIMIZERS[optimizer_type],
            bounds_check_mode=BoundsCheckMode.FATAL,
            stochastic_rounding=False,
            device=on,
            **kwargs,
        )
        self._optim = EmbeddingFusedOptimizer(self._tbe, [table.name for table in tables])
        for table, weight in zip(tables, self._tbe.split_embedding_weights(), strict=True):
            table.init_fn(weight) if table.init_fn else weight.uniform_(-0.1, 0.1)

    @property
    def fused_optimizer(self) -> EmbeddingFusedOptimizer:
        """TBE's optimizer."""
        return self._optim

    def forward(self, features: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Look up and pool."""
        names = [(name, table.embedding_dim) for table in self._tables for name in table.feature_names]
        given = [features[name] for name, _ in names]
        # torch.cat of freed memory ends the process; FBGEMM raises an error.
        indices = torch.cat([bags[0] for bags in given]) if given[1:] else given[0][0]
        starts = list(itertools.accumulate((len(bags[0]) for bags in given), initial=0))
        offsets = [bags[1][:-1] + start for bags, start in zip(given, starts, strict=False)]
        ends = torch.cat([*offsets, (given[-1][1][-1:] + starts[-2])])
        weights = torch.cat([bags[2] for bags in given]) if self._weighted else None
        pooled = self._tbe(indices, ends, per_sample_weights=weights)
        parts = pooled.split([width for _, width in names], dim=1)
        return {name: part for (name, _), part in zip(names, parts, strict=True)}
