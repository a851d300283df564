"""Checks of the options of optimizers; every error names the option."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def as_plain(value: Any) -> Any:
    """Return an option as groups store it: members of enumerations as strings, which any library can load."""
    return getattr(value, "value", value)


def check_range(name: str, value: Any, below: float = math.inf) -> None:
    """Raise ValueError unless a value is a number in [0, below)."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 <= value < below:
        raise ValueError(f"{name} must be a number in [0, {below}), not {value!r}")


def check_learning_rate(lr: Any) -> None:
    """Raise ValueError unless a learning rate is one finite number of at least 0, or a tensor of one."""
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr must be one number, not a tensor of shape {tuple(lr.shape)}")
        lr = lr.item()
    check_range("lr", lr)


def check_betas(betas: Sequence[float]) -> None:
    """Raise ValueError unless betas are two numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers, not {betas!r}")
    for index, beta in enumerate(betas):
        check_range(f"betas[{index}]", beta, below=1.0)


def check_flags(group: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError unless the options of these names are True or False."""
    for name in names:
        if not isinstance(group[name], bool):
            raise ValueError(f"{name} must be True or False, not {group[name]!r}")
