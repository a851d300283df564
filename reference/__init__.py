"""The specification in readable torch: read it to know what is right.

The module paths follow upstream's (``keyed``, ``clipping``, ``warmup``, ``fused``), so code written for
``torchrec.optim`` runs with ``keyedopt.reference`` in its place.
"""

from keyedopt.reference.accumulate import (
    AccumulateAdagrad,
    AccumulateAdam,
    AccumulateAdamW,
    AccumulateRowWiseAdagrad,
    AccumulateSGD,
)
from keyedopt.reference.apply_optimizer_in_backward import (
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from keyedopt.reference.clipping import GradientClipping, GradientClippingOptimizer
from keyedopt.reference.embedding import (
    CachedEmbeddings,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    Jagged,
    PoolingType,
)
from keyedopt.reference.fault_tolerance import FaultTolerantOptimizer
from keyedopt.reference.ftrl import Ftrl
from keyedopt.reference.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from keyedopt.reference.keyed import (
    CombinedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
)
from keyedopt.reference.optimizers import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
)
from keyedopt.reference.rowwise_adagrad import RowWiseAdagrad
from keyedopt.reference.semi_sync import SemisyncOptimizer
from keyedopt.reference.sparse_adam import SparseAdam
from keyedopt.reference.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

__all__ = [
    "LAMB",
    "SGD",
    "AccumulateAdagrad",
    "AccumulateAdam",
    "AccumulateAdamW",
    "AccumulateRowWiseAdagrad",
    "AccumulateSGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "CachedEmbeddings",
    "CombinedOptimizer",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "EmptyFusedOptimizer",
    "FaultTolerantOptimizer",
    "Ftrl",
    "FusedOptimizer",
    "FusedOptimizerModule",
    "GradientClipping",
    "GradientClippingOptimizer",
    "Jagged",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "LarsSGD",
    "OptimizerWrapper",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "PoolingType",
    "RowWiseAdagrad",
    "SemisyncOptimizer",
    "SparseAdam",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "apply_optimizer_in_backward",
    "in_backward_optimizer_filter",
]
