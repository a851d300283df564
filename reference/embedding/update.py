"""What a step does to a table."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from keyedopt.reference.rules import Rows


@dataclass
class Update:
    """What a step is about to do to a table.

    Args:
        weight: the table, (R, D).
        rows: which of its rows are updated, (U,).
        grads: their gradients, (U, D).
        targets: the weight and its states.
        new: what will be written to these rows of each.
    """

    weight: torch.Tensor
    rows: torch.Tensor
    grads: torch.Tensor
    targets: Sequence[torch.Tensor] = ()
    new: Sequence[torch.Tensor] = ()


def listed(
    weight: torch.Tensor, rows: torch.Tensor, grads: torch.Tensor, which: Rows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that a step updates, and their gradients."""
    if which is Rows.ALL:
        every = grads.new_zeros(weight.shape)
        return torch.arange(len(weight), device=rows.device), every.index_copy_(0, rows, grads)
    if which is Rows.NONZERO:
        kept = (grads != 0).any(dim=1)
        return rows[kept], grads[kept]
    return rows, grads
