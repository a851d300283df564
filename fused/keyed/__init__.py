"""Keyed optimizers: the classes of the reference, with a faster `bulk` for the state of torch optimizers.

`bulk` saves and loads the state of many parameters at once. It belongs to the optimizer with the state, so
wrappers and combinations are re-exported from the reference: they use the `bulk` of the optimizers inside.
Importing this package does not change the reference.
"""

from typing import ClassVar

from keyedopt.fused.bulk.bulk_fill import NATIVE
from keyedopt.reference.keyed import CombinedOptimizer, KeyedOptimizer, OptimizerWrapper
from keyedopt.reference.keyed import KeyedOptimizerWrapper as _KeyedOptimizerWrapper
from keyedopt.reference.keyed.bulk import Bulk

__all__ = ["CombinedOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper"]


class KeyedOptimizerWrapper(_KeyedOptimizerWrapper):
    """Give the parameters of a torch optimizer keys; see `keyedopt.reference.KeyedOptimizerWrapper`."""

    bulk: ClassVar[Bulk] = NATIVE
