"""Base classes of optimizers that update parameters in the backward pass, re-exported from the reference."""

from keyedopt.reference.fused import (
    EmptyFusedOptimizer,
    FusedOptimizer,
    FusedOptimizerModule,
    fused_parameters,
    leaves,
)

__all__ = ["EmptyFusedOptimizer", "FusedOptimizer", "FusedOptimizerModule", "fused_parameters", "leaves"]
