"""Norms of rows, and the ratio of two norms, in float64, in which no square of a float32 underflows."""

import torch
from torch import Tensor


def row_norm(values: Tensor) -> Tensor:
    """Return ‖x‖₂ of every row as a column of float64."""
    if values.dtype is not torch.float64:
        wide: Tensor = torch.linalg.vector_norm(values, dim=1, keepdim=True, dtype=torch.float64)
        return wide
    if not values.shape[1]:
        return values.new_zeros(len(values), 1)
    largest = values.abs().amax(dim=1, keepdim=True)
    power = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1)  # division is exact
    scale = torch.where((largest > 0) & largest.isfinite(), power, 1.0)
    norm: Tensor = torch.linalg.vector_norm(values / scale, dim=1, keepdim=True)
    return norm * scale


def trust_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the ratio of two norms; 1 if either is zero."""
    return torch.where((numerator == 0) | (denominator == 0), 1.0, numerator / denominator)
