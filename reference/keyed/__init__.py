"""Keyed optimizers: the base class, the wrapper of torch optimizers, wrappers, and combinations."""

from keyedopt.reference.keyed.base import KeyedOptimizer
from keyedopt.reference.keyed.combined import CombinedOptimizer
from keyedopt.reference.keyed.torch_wrapper import KeyedOptimizerWrapper
from keyedopt.reference.keyed.wrapper import OptimizerWrapper

__all__ = ["CombinedOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper"]
