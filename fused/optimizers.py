"""The optimizers of `keyedopt.reference.optimizers`, with kernels for the steps.

Formulas, arguments, errors and state are those of the reference, and documented there.
"""

from keyedopt.fused.rowwise_adagrad import Adagrad
from keyedopt.fused.rule_optimizer import RuleOptimizer
from keyedopt.reference import optimizers
from keyedopt.reference.optimizers import in_backward_optimizer_filter

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "LarsSGD",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "in_backward_optimizer_filter",
]


class SGD(RuleOptimizer, optimizers.SGD):
    """Stochastic gradient descent, with momentum; see `keyedopt.reference.SGD`."""

    algorithm = "sgd"
    has_fast_path = True


class Adam(RuleOptimizer, optimizers.Adam):
    """Adam; see `keyedopt.reference.Adam`."""

    algorithm = "adam"
    has_fast_path = True


class AdamW(Adam, optimizers.AdamW):
    """Adam with decoupled weight decay; see `keyedopt.reference.AdamW`."""

    has_fast_path = True


class PartialRowWiseAdam(RuleOptimizer, optimizers.PartialRowWiseAdam):
    """Adam with one second moment for each row; see `keyedopt.reference.PartialRowWiseAdam`."""

    algorithm = "partial_rowwise_adam"


class LAMB(RuleOptimizer, optimizers.LAMB):
    """LAMB with the norms of rows; see `keyedopt.reference.LAMB`."""

    algorithm = "lamb"


class PartialRowWiseLAMB(RuleOptimizer, optimizers.PartialRowWiseLAMB):
    """LAMB with one second moment for each row; see `keyedopt.reference.PartialRowWiseLAMB`."""

    algorithm = "partial_rowwise_lamb"


class LarsSGD(RuleOptimizer, optimizers.LarsSGD):
    """LARS with the norms of rows; see `keyedopt.reference.LarsSGD`."""

    algorithm = "lars_sgd"
