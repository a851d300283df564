"""What an embedding table is made of; the names of the fields are torchrec's."""

import enum
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


#: torchrec's names of data types that tables can have.
DATA_TYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
#: Fields of torchrec's configurations that say how tables are spread over ranks; no result depends on them.
PLACEMENT = ("need_pos", "input_dim", "total_num_buckets")


@enum.unique
class PoolingType(enum.Enum):
    """How the rows of a bag become one.

    >>> import torch
    >>> from keyedopt.reference import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
    >>> ones = torch.nn.init.ones_
    >>> table = EmbeddingBagConfig(3, 1, "t", feature_names=["f"], init_fn=ones, pooling=PoolingType.MEAN)
    >>> EmbeddingBagCollection([table])({"f": (torch.tensor([0, 2]), torch.tensor([0, 2]))})["f"].tolist()
    [[1.0]]
    """

    SUM = "SUM"
    MEAN = "MEAN"


@dataclass
class EmbeddingConfig:
    """One table: R = ``num_embeddings`` rows of D = ``embedding_dim`` numbers.

    Args:
        num_embeddings: number of rows, at least 1.
        embedding_dim: width of a row, at least 1.
        name: name of the table, without dots.
        data_type: dtype of the rows. They are read, and their gradients are taken, in float32 at least.
        feature_names: the features that are looked up in this table, at least one.
        weight_init_max: the upper bound of the uniform initial values, any finite number; by default √(1/R).
        weight_init_min: the lower bound, at most ``weight_init_max``; by default −√(1/R).
        init_fn: fills the table instead, in place.

    >>> from keyedopt.reference import EmbeddingConfig
    >>> table = EmbeddingConfig(4, 2, name="products", feature_names=["clicks", "views"])
    >>> table.num_features(), table.get_weight_init_max()
    (2, 0.5)
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: torch.dtype = torch.float32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Callable[[torch.Tensor], Any] | None = None

    def get_weight_init_max(self) -> float:
        """Return the upper bound of the initial values."""
        return math.sqrt(1 / self.num_embeddings) if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """Return the lower bound of the initial values."""
        return -math.sqrt(1 / self.num_embeddings) if self.weight_init_min is None else self.weight_init_min

    def num_features(self) -> int:
        """Return how many features are looked up in the table."""
        return len(self.feature_names)


@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    """One table whose rows are pooled.

    Args:
        num_embeddings, embedding_dim, name, data_type, feature_names: as in `EmbeddingConfig`.
        weight_init_max, weight_init_min, init_fn: as in `EmbeddingConfig`.
        pooling: how the rows of a bag become one.

    >>> import torch
    >>> from keyedopt.reference import EmbeddingBagConfig
    >>> table = EmbeddingBagConfig(4, 2, "products", data_type=torch.float16, feature_names=["clicks"])
    >>> table.pooling.name, table.data_type
    ('SUM', torch.float16)
    """

    pooling: PoolingType = PoolingType.SUM


def own_config(table: Any) -> EmbeddingConfig:
    """Return a configuration of torchrec as one of keyedopt; one of keyedopt as a copy.

    Members of torchrec's `PoolingType` and `DataType` are converted by their names, also in keyedopt's
    classes. A table of torchrec without features has the feature of its name, as in torchrec.

    Raises:
        ValueError: a field has a value that keyedopt does not support.
    """
    own = EmbeddingBagConfig if hasattr(table, "pooling") else EmbeddingConfig
    values = {each.name: getattr(table, each.name) for each in fields(table)}
    known = {each.name for each in fields(own)}
    for each in fields(table):
        value, default = values[each.name], each.default if each.default is not MISSING else None
        if each.name not in known and each.name not in PLACEMENT and value != default:
            raise ValueError(f"{each.name} of table {table.name!r} is not supported: leave it {default!r}")
    values = {name: value for name, value in values.items() if name in known}
    data_type, pooling = values["data_type"], values.get("pooling")
    values["data_type"] = DATA_TYPES.get(getattr(data_type, "name", ""), data_type)
    if isinstance(pooling, enum.Enum) and pooling.name in PoolingType.__members__:
        values["pooling"] = PoolingType[pooling.name]
    if not isinstance(table, EmbeddingConfig) and not values["feature_names"]:
        values["feature_names"] = [table.name]
    return own(**values)


def own_configs(tables: Sequence[Any]) -> list[EmbeddingConfig]:
    """Return the configurations of a collection as keyedopt's, and check them.

    Neighbours of one name that differ in their features only are one table, with the initial values of the
    first: torchrec's fused collections accept them, but save one of the two only.

    Raises:
        ValueError: names the table and the field that is not valid.
    """
    listed: list[EmbeddingConfig] = []
    for table in map(own_config, tables):
        if listed and listed[-1].name == table.name:
            features = [*listed[-1].feature_names, *table.feature_names]
            both = [
                replace(each, feature_names=features, init_fn=listed[-1].init_fn)
                for each in (listed[-1], table)
            ]
            if both[0] == both[1]:
                warnings.warn(
                    f"two configurations of table {table.name!r} are one table, with the features {features}",
                    stacklevel=4,
                )
                listed[-1] = both[0]
                continue
        listed.append(table)
    check_tables(listed)
    return listed


def check_tables(tables: Sequence[EmbeddingConfig]) -> None:
    """Check the tables of a collection.

    Raises:
        ValueError: names the table and the field that cannot be.
    """
    names: set[str] = set()
    if not tables:
        raise ValueError("tables must not be empty: a collection has at least one table")
    for table in tables:
        where = f"table {table.name!r}"
        if not table.name or "." in table.name:
            raise ValueError(
                f"name must not be empty and have no dot (it is part of a key), not {table.name!r}"
            )
        if hasattr(nn.ModuleDict, table.name):  # in torchrec too the tables are children of one
            raise ValueError(f"name must not be {table.name!r}, which torch.nn.ModuleDict has")
        if table.name in names:
            raise ValueError(
                f"Duplicate table name {table.name}: name must be unique, but two tables are called "
                f"{table.name!r}"
            )
        names.add(table.name)
        for field_name in ("num_embeddings", "embedding_dim"):
            value = getattr(table, field_name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field_name} of {where} must be an integer of at least 1, not {value!r}")
        if table.data_type not in DTYPES:
            raise ValueError(f"data_type of {where} must be one of {DTYPES}, not {table.data_type!r}")
        features = table.feature_names
        if not features or len(set(features)) != len(features):
            raise ValueError(f"feature_names of {where} must be one or more, each once, not {features!r}")
        pooling = getattr(table, "pooling", PoolingType.SUM)
        if not isinstance(pooling, PoolingType):
            raise ValueError(f"pooling of {where} must be a member of PoolingType, not {pooling!r}")
        low, high = table.get_weight_init_min(), table.get_weight_init_max()
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ValueError(
                f"weight_init_min and weight_init_max of {where} are no range: {low!r}, {high!r}"
            )


def output_names(tables: Sequence[EmbeddingConfig]) -> list[list[str]]:
    """Name the outputs of each table: the feature, or ``feature@table`` where several tables look it up."""
    listed = [feature for table in tables for feature in table.feature_names]
    return [
        [
            f"{feature}@{table.name}" if listed.count(feature) > 1 else feature
            for feature in table.feature_names
        ]
        for table in tables
    ]
