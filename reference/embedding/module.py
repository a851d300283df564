"""The two collections of embedding tables: with pooling, and without."""

from collections.abc import Sequence
from typing import Any

import torch

from keyedopt.reference.embedding.collection import FusedCollection
from keyedopt.reference.embedding.config import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from keyedopt.reference.embedding.jagged import Features, is_keyed, jagged_tensors, keyed_tensor
from keyedopt.reference.embedding.lookup import pool, uncompiled
from keyedopt.reference.embedding.variable_batch import bags_of_rows, join


class EmbeddingBagCollection(FusedCollection):
    """Tables whose rows are pooled, bag by bag: for each feature and table one output (B, D).

    Output is float32 at least; an empty bag gives zeros.

    >>> import torch
    >>> from keyedopt.reference import EmbeddingBagCollection, EmbeddingBagConfig
    >>> table = EmbeddingBagConfig(3, 1, name="t", feature_names=["f"], init_fn=torch.nn.init.ones_)
    >>> bags = EmbeddingBagCollection([table], torch.optim.SGD, {"lr": 0.1})
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

    def embedding_bag_configs(self) -> Sequence[EmbeddingBagConfig]:
        """Return the configurations of the tables, as torchrec's collection does."""
        return self._configs  # type: ignore[return-value]  # a table without pooling type is summed

    def forward(self, features: Features) -> Any:
        """Look up and pool.

        Args:
            features: for each feature ``(values, offsets)``, with weights ``(values, offsets, weights)``, or
                a `JaggedTensor`; or torchrec's `KeyedJaggedTensor`, whose weights are ignored if
                `is_weighted` is False.

        Returns:
            (B, D) by feature, or by ``feature@table`` where several tables have the feature. For a
            `KeyedJaggedTensor` a `KeyedTensor` with these keys, whose rows are the bags that
            ``inverse_indices`` name if it has them.

        Raises:
            ValueError: names the feature and what is wrong with it; nothing has been looked up.
        """
        if torch.compiler.is_compiling() and self.can_trace(features):
            return self.look_up_traced(features)
        return self._forward(features)

    @uncompiled
    def _forward(self, features: Features) -> Any:
        keyed = is_keyed(features)
        bags = bags_of_rows(features, self.lookup_features()) if keyed else None
        outputs = {
            found.output: pool(
                found.rows,
                found.bags.offsets,
                found.bags.weights,
                getattr(found.table, "pooling", PoolingType.SUM),
            )
            for found in self._look_up(features)
        }
        if not keyed:
            return outputs
        widths = {name: output.shape[1] for name, output in outputs.items()}
        return keyed_tensor(features, widths, join(list(outputs.values()), bags))


class EmbeddingCollection(FusedCollection):
    """Tables whose rows are not pooled: for each feature and table one output (N, D), a row for each value.

    Output is float32 at least; weights multiply the rows.

    >>> import torch
    >>> from keyedopt.reference import EmbeddingCollection, EmbeddingConfig
    >>> table = EmbeddingConfig(3, 1, name="t", feature_names=["f"], init_fn=torch.nn.init.ones_)
    >>> tables = EmbeddingCollection([table], torch.optim.SGD, {"lr": 0.25})
    >>> rows = tables({"f": (torch.tensor([0, 2, 2]), torch.tensor([0, 1, 3]))})["f"]
    >>> rows.sum().backward()
    >>> rows.tolist(), tables.embeddings["t"].weight.tolist()
    ([[1.0], [1.0], [1.0]], [[0.75], [1.0], [0.5]])
    """

    children_name = "embeddings"
    pools = False

    def embedding_configs(self) -> Sequence[EmbeddingConfig]:
        """Return the configurations of the tables, as torchrec's collection does."""
        return self._configs

    def forward(self, features: Features) -> Any:
        """Look up, as `EmbeddingBagCollection` does.

        Args:
            features: as in `EmbeddingBagCollection`.

        Returns:
            (N, D) by feature, or by ``feature@table`` where several tables have the feature; the offsets of
            the input are those of the output. For a `KeyedJaggedTensor` a `JaggedTensor` in place of each.

        Raises:
            ValueError: names the feature and what is wrong with it; nothing has been looked up.
        """
        if torch.compiler.is_compiling() and self.can_trace(features):
            return self.look_up_traced(features)
        return self._forward(features)

    @uncompiled
    def _forward(self, features: Features) -> Any:
        outputs = {}
        looked_up = self._look_up(features)
        for found in looked_up:
            weights = found.bags.weights
            scale = 1.0 if weights is None else weights.to(found.rows.dtype)[:, None]
            outputs[found.output] = found.rows * scale
        if not is_keyed(features):
            return outputs
        bags = [found.bags for found in looked_up]
        values = [one.values for one in bags] if self.need_indices() else None
        return jagged_tensors(features, outputs, [one.offsets for one in bags], values)
