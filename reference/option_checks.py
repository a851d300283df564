"""What the dense optimizers refuse, with an error that names the argument."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from keyedopt.reference.rules.rows import check_rows


def check_range(name: str, value: Any, below: float = math.inf) -> None:
    """Refuse a number that is not in [0, below).

    Raises:
        ValueError: naming the argument.
    """
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 <= value < below:
        raise ValueError(f"{name} must be a number in [0, {below}), not {value!r}")


def check_rate(lr: Any) -> None:
    """Refuse a learning rate that is not one finite number of at least 0."""
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr must be one number, not a tensor of shape {tuple(lr.shape)}")
        lr = lr.item()
    check_range("lr", lr)


def check_betas(betas: Sequence[float]) -> None:
    """Refuse anything but two numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers, not {betas!r}")
    for index, beta in enumerate(betas):
        check_range(f"betas[{index}]", beta, below=1.0)


def check_gradient(param: Tensor, finite: bool) -> None:
    """Refuse a gradient that no rule can take: layout, rows; on demand, one that is not finite."""
    grad = param.grad
    assert grad is not None
    if grad.layout is torch.sparse_coo:
        if grad.sparse_dim() != 1:
            raise RuntimeError(
                f"a sparse gradient must be so in its rows alone, not {grad.sparse_dim()} ways"
            )
        check_rows(grad._indices(), len(param), "indices of the gradient")
        grad = grad._values()
    elif grad.layout is not torch.strided:
        raise RuntimeError(f"a gradient must be dense or sparse COO, not {grad.layout}")
    if finite and not grad.isfinite().all():
        raise RuntimeError("a gradient is not finite, and error_if_nonfinite asks to refuse it")
