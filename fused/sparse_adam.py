"""SparseAdam, with kernels for the steps."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from keyedopt.fused.backends.interface import Step
from keyedopt.fused.rule_optimizer import RuleOptimizer
from keyedopt.reference import sparse_adam
from keyedopt.reference.rules.options import EpsPlacement

__all__ = ["SparseAdam"]


class SparseAdam(RuleOptimizer, sparse_adam.SparseAdam):
    """Adam for the elements that a sparse gradient lists; see `keyedopt.reference.SparseAdam`."""

    algorithm = "sparse_adam"
    has_fast_path = True

    def make_step(self, group: Mapping[str, Any], count: int | Tensor = 1, first: bool = False) -> Step:
        """Return the step of a backend, with eps added to √v as in torch's code."""
        placement = EpsPlacement.BEFORE_BIAS_CORRECTION
        return super().make_step({**group, "eps_placement": placement}, count, first)
