"""The surface of `keyedopt.reference`, as fast as the hardware allows."""

from keyedopt.fused.accumulate import (
    AccumulateAdagrad,
    AccumulateAdam,
    AccumulateAdamW,
    AccumulateRowWiseAdagrad,
    AccumulateSGD,
)
from keyedopt.fused.apply_optimizer_in_backward import (
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from keyedopt.fused.clipping import GradientClipping, GradientClippingOptimizer
from keyedopt.fused.embedding import (
    CachedEmbeddings,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    Jagged,
    PoolingType,
    as_torchrec,
)
from keyedopt.fused.explanation import explain
from keyedopt.fused.fault_tolerance import FaultTolerantOptimizer
from keyedopt.fused.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
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
    AdamW,
    Ftrl,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
)
from keyedopt.fused.rowwise_adagrad import RowWiseAdagrad
from keyedopt.fused.semi_sync import SemisyncOptimizer
from keyedopt.fused.sharded_tables import use_keyedopt_kernels
from keyedopt.fused.sparse_adam import SparseAdam
from keyedopt.fused.torchrec_kernels import use_fbgemm_kernels
from keyedopt.fused.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

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
    "as_torchrec",
    "explain",
    "in_backward_optimizer_filter",
    "use_fbgemm_kernels",
    "use_keyedopt_kernels",
]
