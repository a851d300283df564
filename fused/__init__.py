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
from keyedopt.fused.optimizers import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
)
from keyedopt.fused.rowwise_adagrad import RowWiseAdagrad
from keyedopt.fused.sparse_adam import SparseAdam

__all__ = [
    "LAMB",
    "SGD",
    "AccumulateAdagrad",
    "AccumulateAdam",
    "AccumulateSGD",
    "Adagrad",
    "Adam",
    "CombinedOptimizer",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "Jagged",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "LarsSGD",
    "OptimizerWrapper",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "PoolingType",
    "RowWiseAdagrad",
    "SparseAdam",
    "apply_optimizer_in_backward",
    "in_backward_optimizer_filter",
]
