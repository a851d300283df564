"""Bases of the optimizers that update their parameters in the backward pass: the reference's own."""

from keyedopt.reference.fused import (
    EmptyFusedOptimizer,
    FusedOptimizer,
    FusedOptimizerModule,
    fused_parameters,
    leaves,
)

__all__ = ["EmptyFusedOptimizer", "FusedOptimizer", "FusedOptimizerModule", "fused_parameters", "leaves"]
