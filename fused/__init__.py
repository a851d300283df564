"""The surface of `keyedopt.reference`, as fast as the hardware allows."""

from keyedopt.fused.accumulate import (
    AccumulateAdagrad,
    AccumulateAdam,
    AccumulateSGD,
)
from keyedopt.fused.apply_optimizer_in_backward import (
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from keyedopt.fused.embedding import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    Jagged,
    PoolingType,
)
from keyedopt.fused.keyed import (
    CombinedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
)

__all__ = [
    "AccumulateAdagrad",
    "AccumulateAdam",
    "AccumulateSGD",
    "CombinedOptimizer",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "Jagged",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "OptimizerWrapper",
    "PoolingType",
    "apply_optimizer_in_backward",
    "in_backward_optimizer_filter",
]
