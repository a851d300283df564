"""Optimizers that step in the backward pass, re-exported from the reference."""

from keyedopt.reference.apply_optimizer_in_backward import (
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)

__all__ = ["apply_optimizer_in_backward", "in_backward_optimizer_filter"]
