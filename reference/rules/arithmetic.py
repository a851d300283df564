"""Functions that all rules use: precision, decay, norms and ratios with a defined result at zero."""

import torch
from torch import Tensor

from keyedopt.reference.rules.options import Decay


def widen(tensor: Tensor) -> Tensor:
    """Return the values in the dtype of the computation: float32 at least."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def narrow(values: Tensor, like: Tensor) -> Tensor:
    """Return a result with the dtype and shape of the tensor that it replaces."""
    return values.to(like.dtype).reshape(like.shape)


def column(per_row: Tensor) -> Tensor:
    """Return a state with one value for each row, (R,) or (R, 1), as a column that broadcasts."""
    return per_row.reshape(-1, 1)


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide, with 0 / 0 = 0: a row that never had a gradient does not change, even without eps."""
    undefined = (numerator == 0) & (denominator == 0)
    return torch.where(undefined, 0.0, numerator / denominator)


def ascend(grad: Tensor, maximize: bool) -> Tensor:
    """Return the gradient, negated if `maximize`."""
    return -widen(grad) if maximize else widen(grad)


def decayed_grad(grad: Tensor, weight: Tensor, weight_decay: float, decay: Decay) -> Tensor:
    """Return the gradient with L2 decay added, if `decay` is L2."""
    return grad + weight_decay * weight if decay is Decay.L2 and weight_decay else grad


def decoupled(weight: Tensor, weight_decay: float, decay: Decay) -> Tensor | float:
    """Return the term that decoupled decay adds to the direction of a step."""
    return weight_decay * weight if decay is Decay.DECOUPLED and weight_decay else 0.0


def row_mean_square(values: Tensor) -> Tensor:
    """Return mean(x²) of every row, as a column."""
    return values.square().mean(dim=1, keepdim=True)


def row_norm(values: Tensor) -> Tensor:
    """Return ‖x‖₂ of every row, as a column, safe from overflow and underflow of the squares."""
    # A sum has, unlike a maximum, a value for the part of a row that is on a rank without columns.
    size = values.abs().sum(dim=1, keepdim=True).clamp(max=torch.finfo(values.dtype).max / 2)
    power = torch.ldexp(torch.ones_like(size), size.log2().floor())  # division is exact
    scale = torch.where(size > 0, power, 1.0)
    return scale * (values / scale).square().sum(dim=1, keepdim=True).sqrt()


def trust_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the ratio of two norms, or 1 if either norm is zero."""
    return torch.where((numerator == 0) | (denominator == 0), 1.0, numerator / denominator)


def limit_norm(weight: Tensor, max_norm: float | None) -> Tensor:
    """Scale rows with a norm above `max_norm` down to it; None for no limit."""
    if max_norm is None:
        return weight
    norm = row_norm(weight)
    return torch.where(norm > max_norm, weight * (max_norm / norm), weight)


def bias_correction(beta: float, step: int | float | Tensor, like: Tensor) -> Tensor | float:
    """Return 1 − βᵗ for one count t, or as a column for a count of each row (R,)."""
    if not isinstance(step, Tensor):
        return 1.0 - beta**step
    exact = 1.0 - torch.as_tensor(beta, dtype=torch.float64, device=step.device) ** step.double()
    per_row = exact.reshape((-1, *[1] * (like.ndim - 1))) if step.ndim else exact
    return per_row.to(like.dtype)
