"""Collections of tables as torchrec's own, for torchrec's tools that know only its classes."""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from keyedopt.reference.embedding.config import DATA_TYPES, EmbeddingConfig
from keyedopt.reference.embedding.table_collection import TableCollection


def as_torchrec(model: nn.Module) -> nn.Module:
    """Replace the collections of tables in a model by torchrec's, which have the same weights and keys.

    torchrec's tools for inference, such as `quantize_inference_model`, know torchrec's classes only. Backward
    passes do not update the tables of torchrec's collections.

    Args:
        model: changed in place, unless the model is a collection.

    Returns:
        The model; torchrec's collection if the model is a collection.

    Raises:
        ImportError: torchrec is not installed.
        ValueError: torchrec does not support the dtype of a table; nothing is changed.

    >>> import torch
    >>> from keyedopt.fused import EmbeddingBagCollection, EmbeddingBagConfig, as_torchrec
    >>> table = EmbeddingBagConfig(4, 2, name="t", feature_names=["f"])
    >>> bags = EmbeddingBagCollection([table], torch.optim.SGD, {"lr": 0.5})
    >>> type(as_torchrec(bags)).__module__
    'torchrec.modules.embedding_modules'
    """
    made = {module: _converted(module) for module in model.modules() if isinstance(module, TableCollection)}
    if model in made:
        return made[model]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in made:
                setattr(parent, name, made[child])
    return model


def _converted(collection: Any) -> nn.Module:
    torchrec = importlib.import_module("torchrec")
    configs = importlib.import_module("torchrec.modules.embedding_configs")
    pools = collection.pools
    config_class = torchrec.EmbeddingBagConfig if pools else torchrec.EmbeddingConfig
    names = {dtype: name for name, dtype in DATA_TYPES.items()}
    tables = [_config(config_class, configs, names, table) for table in collection.table_configs()]
    made: Any
    if pools:
        made = torchrec.EmbeddingBagCollection(
            tables=tables, is_weighted=collection.is_weighted(), device=collection.device
        )
    elif collection.is_weighted():
        raise ValueError("torchrec has no collection of weighted rows without pooling")
    else:
        made = torchrec.EmbeddingCollection(
            tables=tables, device=collection.device, need_indices=collection.need_indices()
        )
    children = getattr(made, collection.children_name)
    for name, table in getattr(collection, collection.children_name).items():
        children[name].weight = table.weight
    return made.train(collection.training)  # type: ignore[no-any-return]


def _config(config_class: Any, configs: Any, names: Mapping[Any, str], table: EmbeddingConfig) -> Any:
    if table.data_type not in names:
        raise ValueError(f"data_type of table {table.name!r} is not one of torchrec's: {table.data_type}")
    pooling = getattr(table, "pooling", None)
    more = {} if pooling is None else {"pooling": configs.PoolingType[pooling.name]}
    return config_class(
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        name=table.name,
        feature_names=list(table.feature_names),
        data_type=configs.DataType[names[table.data_type]],
        init_fn=_leave,
        **more,
    )


def _leave(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight, which gets the memory of a table."""
    return weight
