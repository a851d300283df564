"""Keyed optimizers: the base, one around an optimizer of torch, wrappers, and combinations."""

from keyedopt.fused.keyed.base import KeyedOptimizer
from keyedopt.fused.keyed.combined import CombinedOptimizer
from keyedopt.fused.keyed.composition import OptimizerWrapper
from keyedopt.fused.keyed.torch_wrapper import KeyedOptimizerWrapper

__all__ = ["CombinedOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper"]
