"""Find the rows in the gradient of a table, and apply a rule to only these rows."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from keyedopt.reference.rules.arithmetic import widen
from keyedopt.reference.rules.options import Rows


def check_rows(indices: Tensor, num_rows: int, name: str = "indices") -> None:
    """Raise ValueError unless row numbers are integers in [0, num_rows).

    Raises:
        ValueError: with the name of the argument and the first invalid row.
    """
    if indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64, not {indices.dtype}")
    bad = indices[(indices < 0) | (indices >= num_rows)]
    if bad.numel():
        raise ValueError(f"{name} must be in [0, {num_rows}), and {int(bad[0])} is not")


def coalesce(indices: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the gradients of the same row.

    The sum is taken in float64 and rounded once, so its error does not grow with the number of
    gradients. (A float32 sum of ten million gradients may have an error of a tenth of Σ|g|.)

    Args:
        indices: (N,) row numbers, in any order.
        grads: (N, …) their gradients.

    Returns:
        The distinct rows (U,) in ascending order, and their gradients (U, …) in float32 at least.

    >>> coalesce(torch.tensor([3, 1, 3]), torch.tensor([[1.0], [2.0], [4.0]]))
    (tensor([1, 3]), tensor([[2.],
            [5.]]))
    """
    rows, positions = torch.unique(indices, return_inverse=True)
    total = torch.zeros((len(rows), *grads.shape[1:]), dtype=torch.float64, device=grads.device)
    total.index_add_(0, positions, grads.double())
    return rows, total.to(widen(grads[:0]).dtype)


@torch.no_grad()
def update_rows(
    rule: Callable[..., tuple[Tensor, ...]],
    weight: Tensor,
    states: Sequence[Tensor],
    rows: Tensor,
    grads: Tensor,
    **options: Any,
) -> None:
    """Apply a rule to the given rows of a table, in place; every other row keeps its bits.

    Args:
        rule: called with (weight, grad, *states, **options); returns the new weight and states.
        weight: (R, …).
        states: each (R, …): one entry for each row.
        rows: (U,) distinct row numbers.
        grads: (U, …) their gradients.
        options: arguments of the rule. A `step` with a count for each row has U elements.
    """
    if not len(rows):
        return
    tensors = [weight, *states]
    old = [tensor.index_select(0, rows) for tensor in tensors]
    for tensor, new in zip(tensors, rule(old[0], grads, *old[1:], **options), strict=True):
        tensor.index_copy_(0, rows, new)


def updated_rows(param: Tensor, grad: Tensor, which: Rows) -> tuple[Tensor | None, Tensor]:
    """Return the rows (U,) of a parameter that a step updates, or None for all, and their gradients."""
    if grad.is_sparse:
        rows, grads = coalesce(grad._indices()[0], grad._values())
        if which is Rows.ALL:
            every = grads.new_zeros(param.shape)
            return None, every.index_copy_(0, rows, grads)
    elif which is Rows.NONZERO:
        rows = torch.arange(len(param), device=grad.device)
        grads = grad
    else:
        return None, grad
    if which is Rows.NONZERO:
        kept = (grads != 0).reshape(len(rows), math.prod(grads.shape[1:])).any(dim=1)
        rows, grads = rows[kept], grads[kept]
    return rows, grads
