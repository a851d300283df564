"""Looking rows up, and pooling them, in plain differentiable torch.

A table is seen by autograd through a stand-in: a leaf of the table's shape, in the dtype of its
gradient (float32 at least, also for a table in half precision), that has one number of memory. The
gradient of the stand-in is sparse: a row for each lookup. Where a table is used more than once in a
graph, autograd puts these rows one after the other. So they arrive together, once a backward pass.
"""

from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd.function import FunctionCtx

from keyedopt.reference.embedding.config import PoolingType

#: What torch.compile calls as it is: lookups and updates write where autograd and a compiler do not look.
#: (The public ``torch.compiler.disable`` does the same, and imports the compiler at once.)
uncompiled = _disable_dynamo


def gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows of a table are read and differentiated."""
    return torch.promote_types(dtype, torch.float32)


def stand_in(weight: torch.Tensor) -> torch.Tensor:
    """Make the leaf through which autograd sees a table."""
    one = torch.zeros((), dtype=gradient_dtype(weight.dtype), device=weight.device)
    return one.expand(weight.shape).requires_grad_()


class _Gather(torch.autograd.Function):
    """``weight[rows]``, differentiable by the stand-in of the table."""

    @staticmethod
    def forward(
        ctx: Any, leaf: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, trains: object
    ) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.shape, ctx.trains = weight.shape, trains
        return weight.detach()[rows].to(leaf.dtype)

    @staticmethod
    @uncompiled
    def backward(ctx: FunctionCtx, *grads: Any) -> Any:
        (rows,) = ctx.saved_tensors  # type: ignore[attr-defined]
        shape: torch.Size = ctx.shape  # type: ignore[attr-defined]
        sparse = torch.sparse_coo_tensor(rows[None], grads[0].detach(), shape, check_invariants=False)
        return sparse, None, None, None


def gather(
    weight: torch.Tensor, leaf: torch.Tensor | None, rows: torch.Tensor, trains: object = None
) -> torch.Tensor:
    """Return the rows, in float32 at least: (R, D), (N,) → (N, D).

    Args:
        weight: the table, (R, D).
        leaf: its stand-in, whose gradient is wanted; None where there is none to take.
        rows: checked row numbers, (N,).
        trains: what the backward pass needs, kept as long as the output.

    Raises:
        ValueError: the row numbers are not on the device of the table.
    """
    if rows.device != weight.device:
        raise ValueError(f"indices must be on the device of the table, {weight.device}, not on {rows.device}")
    if leaf is None:
        return weight.detach()[rows].to(gradient_dtype(weight.dtype))
    gathered: torch.Tensor = _Gather.apply(  # type: ignore[no-untyped-call, unused-ignore]
        leaf, weight, rows, trains
    )
    return gathered


def pool(
    rows: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, kind: PoolingType
) -> torch.Tensor:
    """Make one row of each bag: (N, D), (B + 1,) → (B, D); an empty bag gives zeros.

    With r the rows of a bag and c their weights (1 without)::

        SUM     Σ cᵢ rᵢ
        MEAN    Σ cᵢ rᵢ / n     n the number of rows of the bag, whatever their weights
    """
    if weights is not None:
        rows = rows * weights.to(rows.dtype)[:, None]
    lengths = offsets.diff()
    bags = torch.repeat_interleave(torch.arange(len(lengths), device=rows.device), lengths)
    pooled = rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, bags, rows)
    if kind is PoolingType.MEAN:
        pooled = pooled / lengths.clamp(min=1)[:, None]
    return pooled


def rows_gradient(
    grad: torch.Tensor, offsets: torch.Tensor | None, weights: torch.Tensor | None, mean: bool, count: int
) -> torch.Tensor:
    """Return the gradients of the rows that were looked up, (N, D), from those of the output of `pool`.

    Args:
        grad: (B, D), or (N, D) if rows were not pooled.
        offsets: (B + 1,); None if rows were not pooled.
        weights: (N,), or None.
        mean: whether bags were divided by their lengths.
        count: the number of rows N.
    """
    if offsets is not None:
        lengths = offsets.diff()
        if mean:
            grad = grad / lengths.clamp(min=1)[:, None]
        bags = torch.arange(len(lengths), device=grad.device)
        grad = grad[torch.repeat_interleave(bags, lengths, output_size=count)]
    return grad if weights is None else grad * weights.to(grad.dtype)[:, None]
