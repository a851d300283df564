"""The two collections of embedding tables: with pooling, and without."""

import torch

from keyedopt.reference.embedding.collection import FusedCollection
from keyedopt.reference.embedding.config import PoolingType
from keyedopt.reference.embedding.inputs import Features
from keyedopt.reference.embedding.lookup import pool, uncompiled


class EmbeddingBagCollection(FusedCollection):
    """Tables whose rows are pooled, bag by bag: for each feature and table one output (B, D).

    See `FusedCollection`. Output is float32 at least; an empty bag gives zeros.

    >>> from torch import nn, optim
    >>> from keyedopt.reference.embedding import EmbeddingBagConfig
    >>> table = EmbeddingBagConfig(3, 1, name="t", feature_names=["f"], init_fn=nn.init.ones_)
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

    @uncompiled
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
            found.output: pool(
                found.rows,
                found.bags.offsets,
                found.bags.weights,
                getattr(found.table, "pooling", PoolingType.SUM),
            )
            for found in self._look_up(features)
        }


class EmbeddingCollection(FusedCollection):
    """Tables whose rows are not pooled: for each feature and table one output (N, D), a row for each value.

    See `FusedCollection`. Output is float32 at least; weights multiply the rows.
    """

    children_name = "embeddings"

    @uncompiled
    def forward(self, features: Features) -> dict[str, torch.Tensor]:
        """Look up, as `EmbeddingBagCollection` does; the offsets of the input are those of the output."""
        outputs = {}
        for found in self._look_up(features):
            weights = found.bags.weights
            scale = 1.0 if weights is None else weights.to(found.rows.dtype)[:, None]
            outputs[found.output] = found.rows * scale
        return outputs
