"""Lookups in tables without an optimizer: plain parameters with sparse gradients."""

import torch
from torch import Tensor
from torch.nn import functional

from keyedopt.fused.embedding.inputs import Bags


def look_up_plainly(weight: Tensor, bags: Bags, pools: bool, mean: bool) -> Tensor:
    """Look up and pool with what autograd differentiates: (B, D) with pooling, (N, D) without."""
    values, offsets, weights = bags
    rows = functional.embedding(values, weight, sparse=True)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if weights is not None:
        rows = rows * weights.to(rows.dtype)[:, None]
    if not pools:
        return rows
    lengths = offsets.diff()
    places = torch.repeat_interleave(lengths, output_size=len(rows))
    pooled = rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, places, rows)
    return pooled / lengths.clamp(min=1)[:, None] if mean else pooled
