"""Keyed optimizers: the reference's classes. State of a torch optimizer is saved and loaded in bulk.

`bulk` is the only difference. It belongs to the optimizer that holds the state, so wrappers and combinations
are the reference's own classes: they use the `bulk` of the optimizers inside. Importing this package changes
nothing for the reference.
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
