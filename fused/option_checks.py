"""What the algorithms refuse in their options, with an error that names the option."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def check_range(name: str, value: Any, below: float = math.inf) -> None:
    """Refuse what is no number in [0, below).

    Raises:
        ValueError: naming the option.
    """
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 <= value < below:
        raise ValueError(f"{name} must be a number in [0, {below}), not {value!r}")


def check_rate(lr: Any) -> None:
    """Refuse a learning rate that is not one finite number of at least 0; a tensor of one element is one."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must be one number, not a tensor of shape {tuple(lr.shape)}")
    check_range("lr", lr.item() if isinstance(lr, Tensor) else lr)


def check_betas(betas: Sequence[float]) -> None:
    """Refuse anything but two numbers in [0, 1)."""
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers, not {betas!r}")
    for index, beta in enumerate(betas):
        check_range(f"betas[{index}]", beta, below=1.0)


def check_flags(group: Any, *names: str) -> None:
    """Refuse options that are not True or False."""
    for name in names:
        if not isinstance(group[name], bool):
            raise ValueError(f"{name} must be True or False, not {group[name]!r}")


def plain(value: Any) -> Any:
    """Return an option as groups keep it: the text of an enumeration's member, so that anyone can load it."""
    return getattr(value, "value", value)
