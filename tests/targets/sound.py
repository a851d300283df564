"""Sound optimizers that differ from the reference in what documents leave free, as one implementation."""

from sound_accumulate import (
    AccumulateAdagrad,
    AccumulateAdam,
    AccumulateAdamW,
    AccumulateRowWiseAdagrad,
    AccumulateSGD,
)
from sound_algorithms import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)
from sound_embedding import EmbeddingBagCollection, EmbeddingCollection
from sound_keyed import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)
from sound_replicas import FaultTolerantOptimizer, SemisyncOptimizer
from sound_sparse import SparseAdam

from keyedopt.conformance.targets.implementation import Implementation

__all__ = [
    "LAMB", "SGD", "AccumulateAdagrad", "AccumulateAdam", "AccumulateAdamW", "AccumulateRowWiseAdagrad",
    "AccumulateSGD", "Adagrad", "Adam", "AdamW",
    "CombinedOptimizer", "EmbeddingBagCollection", "EmbeddingCollection", "FaultTolerantOptimizer",
    "Ftrl",
    "GradientClipping", "GradientClippingOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper", "LarsSGD",
    "OptimizerWrapper", "PartialRowWiseAdam", "PartialRowWiseLAMB", "RowWiseAdagrad", "SemisyncOptimizer",
    "SparseAdam", "WarmupOptimizer", "WarmupPolicy", "WarmupStage",
]  # fmt: skip

IMPLEMENTATION = Implementation(
    name="sound",
    root="sound",
    areas=(
        *("keyed", "combined", "wrapper", "clipping", "warmup"),
        *("algorithms", "accumulate", "sparse", "semi_sync", "fault_tolerance"),
    ),
    absent=(
        *("*.decay", "*.rows", "*.bias_correction", "*.eps_placement", "*.error_if_nonfinite", "*.max_norm"),
        *("FusedOptimizer", "EmbeddingBagCollection", "apply_optimizer_in_backward"),
    ),
)

#: The modules with the reference's optimizers, whose rules they use.
EMBEDDING = Implementation(
    name="sound-embedding",
    root="keyedopt.reference",
    names={name: f"sound_embedding:{name}" for name in ("EmbeddingBagCollection", "EmbeddingCollection")},
    areas=("fused",),
)
