"""The optimizers of `keyedopt.reference.optimizers`, with kernels for the steps.

Formulas, arguments, errors and state are those of the reference, and documented there.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from keyedopt.fused.backends.interface import Step
from keyedopt.fused.rowwise_adagrad import Adagrad
from keyedopt.fused.rule_optimizer import RuleOptimizer
from keyedopt.reference import optimizers
from keyedopt.reference.ftrl import positive_rate
from keyedopt.reference.optimizers import in_backward_optimizer_filter

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
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


class Ftrl(RuleOptimizer, optimizers.Ftrl):
    """FTRL-Proximal; see `keyedopt.reference.Ftrl`.

    A learning rate on an accelerator is not read before a step, so that steps do not synchronize: 0 there
    makes weights NaN instead of raising ValueError.
    """

    algorithm = "ftrl"

    def check_gradients(self) -> None:
        """Raise what `step` raises if a gradient or a learning rate cannot be used."""
        for group in self.param_groups:
            _check_rate(group["lr"])
        super().check_gradients()

    def make_step(self, group: Mapping[str, Any], count: int | Tensor = 1, first: bool = False) -> Step:
        """Return the step of a backend.

        Raises:
            ValueError: the learning rate is 0.
        """
        _check_rate(group["lr"])
        return super().make_step(group, count, first)


def _check_rate(lr: float | Tensor) -> None:
    """Raise ValueError for a learning rate of 0, unless reading it would synchronize."""
    if not isinstance(lr, Tensor) or lr.is_cpu:
        positive_rate(lr)
