"""Norms of rows, and the ratio of two norms, in float64, in which no square of a float32 underflows."""

import torch
from torch import Tensor


def row_norm(values: Tensor) -> Tensor:
    """Return ‖x‖₂ of every row as a column of float64."""
    if values.dtype is not torch.float64:
        wide: Tensor = torch.linalg.vector_norm(values, dim=1, keepdim=True, dtype=torch.float64)
        return wide
    # A sum has, unlike a maximum, a value for the part of a row that is on a rank without columns.
    size = values.abs().sum(dim=1, keepdim=True).clamp(max=torch.finfo(values.dtype).max / 2)
    power = torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent - 1)  # division is exact
    scale = torch.where(size > 0, power, 1.0)
    norm: Tensor = torch.linalg.vector_norm(values / scale, dim=1, keepdim=True)
    return norm * scale


def trust_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the ratio of two norms; 1 if either is zero."""
    return torch.where((numerator == 0) | (denominator == 0), 1.0, numerator / denominator)
