"""The two collections of embedding tables: with pooling, and without."""

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from keyedopt.fused.embedding.collection import FusedCollection
from keyedopt.reference.embedding.inputs import Features

#: What a compiled model calls as it is, between two of its graphs: kernels do the work, and to trace their
#: launches takes seconds. (The public ``torch.compiler.disable`` imports the compiler at once.)
_look_up = _disable_dynamo(FusedCollection.look_up)


class EmbeddingBagCollection(FusedCollection):
    """Tables whose rows are pooled, bag by bag: for each feature and table one output (B, D).

    See `FusedCollection`. Output is float32 at least; an empty bag gives zeros.

    >>> import torch
    >>> from torch import nn, optim
    >>> from keyedopt.fused.embedding import EmbeddingBagConfig
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
    pools = True

    def forward(self, features: Features) -> dict[str, Tensor]:
        """Look up and pool.

        Args:
            features: for each feature ``(values, offsets)``, with weights ``(values, offsets, weights)``; see
                `Jagged`.

        Returns:
            (B, D) by feature, or by ``feature@table`` where several tables have the feature.

        Raises:
            ValueError: names the feature and what is wrong with it; nothing has been looked up.
        """
        if torch.compiler.is_compiling():
            return _look_up(self, features)
        return self.look_up(features)


class EmbeddingCollection(FusedCollection):
    """Tables whose rows are not pooled: for each feature and table one output (N, D), a row for each value.

    See `FusedCollection`. Output is float32 at least; weights multiply the rows.
    """

    children_name = "embeddings"
    pools = False

    def forward(self, features: Features) -> dict[str, Tensor]:
        """Look up, as `EmbeddingBagCollection` does; the offsets of the input are those of the output."""
        if torch.compiler.is_compiling():
            return _look_up(self, features)
        return self.look_up(features)
