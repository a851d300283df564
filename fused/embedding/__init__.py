"""Embedding tables that are updated in the backward pass, by the fastest backend for them."""

from keyedopt.fused.embedding.as_torchrec import as_torchrec
from keyedopt.fused.embedding.collection import EmbeddingBagCollection, EmbeddingCollection, FusedCollection
from keyedopt.fused.embedding.optimizer import EmbeddingFusedOptimizer
from keyedopt.reference.embedding.cached import CachedEmbeddings
from keyedopt.reference.embedding.config import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from keyedopt.reference.embedding.jagged import Jagged

__all__ = [
    "CachedEmbeddings",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "EmbeddingFusedOptimizer",
    "FusedCollection",
    "Jagged",
    "PoolingType",
    "as_torchrec",
]
