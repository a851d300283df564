"""The tables of a collection: checked, made, and where each feature is looked up."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from keyedopt.fused.embedding.memory import empty
from keyedopt.reference.embedding.config import EmbeddingConfig, PoolingType

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class EmbeddingTable(nn.Module):
    """The rows of one table, and the name under which they are saved: ``<table>.weight``."""

    def __init__(self, config: EmbeddingConfig, device: torch.device | str | None) -> None:
        super().__init__()
        rows, width = config.num_embeddings, config.embedding_dim
        self.weight = nn.Parameter(empty((rows, width), config.data_type, device))
        with torch.no_grad():
            if config.init_fn is None:
                self.weight.uniform_(config.get_weight_init_min(), config.get_weight_init_max())
            else:
                config.init_fn(self.weight)


class Slot(NamedTuple):
    """One lookup of every forward.

    Args:
        output: the name of its output.
        feature: what is looked up.
        table: where.
        mean: whether bags are divided by their lengths.
    """

    output: str
    feature: str
    table: str
    mean: bool


def slots(configs: Sequence[EmbeddingConfig], pools: bool) -> list[Slot]:
    """List the lookups; an output is named ``feature@table`` where several tables have the feature."""
    everywhere = [feature for config in configs for feature in config.feature_names]
    return [
        Slot(
            f"{feature}@{config.name}" if everywhere.count(feature) > 1 else feature,
            feature,
            config.name,
            pools and getattr(config, "pooling", PoolingType.SUM) is PoolingType.MEAN,
        )
        for config in configs
        for feature in config.feature_names
    ]


def check_tables(configs: Sequence[EmbeddingConfig]) -> None:
    """Refuse tables that cannot be.

    Raises:
        ValueError: names the table and the field.
    """
    if not configs:
        raise ValueError("tables must not be empty: a collection has at least one")
    seen: set[str] = set()
    for config in configs:
        if not config.name or "." in config.name:
            raise ValueError(f"name must be a part of a key, not empty and without dots, not {config.name!r}")
        if hasattr(nn.ModuleDict, config.name):
            raise ValueError(f"name must not be {config.name!r}, which torch.nn.ModuleDict has")
        if config.name in seen:
            raise ValueError(f"name must be unique, but {config.name!r} is the name of two tables")
        seen.add(config.name)
        problem = _problem(config)
        if problem:
            raise ValueError(f"table {config.name!r}: {problem}")


def _problem(config: EmbeddingConfig) -> str:
    for field in ("num_embeddings", "embedding_dim"):
        value = getattr(config, field)
        if type(value) is not int or value < 1:
            return f"{field} must be an integer of at least 1, not {value!r}"
    if config.data_type not in DTYPES:
        return f"data_type must be one of {DTYPES}, not {config.data_type!r}"
    features = config.feature_names
    if not features or len(set(features)) < len(features):
        return f"feature_names must be one or more, each once, not {features!r}"
    pooling = getattr(config, "pooling", PoolingType.SUM)
    if not isinstance(pooling, PoolingType):
        return f"pooling must be a member of PoolingType, not {pooling!r}"
    low, high = config.get_weight_init_min(), config.get_weight_init_max()
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        return f"weight_init_min and weight_init_max must be a range, not {low!r} and {high!r}"
    return ""
