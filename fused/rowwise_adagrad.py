"""Adagrad and row-wise Adagrad, with kernels for the steps."""

from keyedopt.fused.rule_optimizer import RuleOptimizer
from keyedopt.reference import rowwise_adagrad

__all__ = ["Adagrad", "RowWiseAdagrad"]


class Adagrad(RuleOptimizer, rowwise_adagrad.Adagrad):
    """Adagrad; see `keyedopt.reference.Adagrad`."""

    algorithm = "adagrad"
    has_fast_path = True


class RowWiseAdagrad(Adagrad, rowwise_adagrad.RowWiseAdagrad):
    """Adagrad with one learning rate for each row; see `keyedopt.reference.RowWiseAdagrad`."""

    algorithm = "rowwise_adagrad"
