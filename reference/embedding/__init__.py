"""Embedding tables that are updated in the backward pass, in plain torch."""

from keyedopt.reference.embedding.cached import CachedEmbeddings
from keyedopt.reference.embedding.collection import FusedCollection
from keyedopt.reference.embedding.config import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from keyedopt.reference.embedding.jagged import Jagged
from keyedopt.reference.embedding.module import EmbeddingBagCollection, EmbeddingCollection
from keyedopt.reference.embedding.optimizer import EmbeddingFusedOptimizer

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
]
