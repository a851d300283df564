"""The p-norm of tensors that are spread over ranks."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import distributed as dist


def p_norm(
    tensors: Iterable[torch.Tensor],
    p: float,
    device: torch.device,
    groups: Sequence[Any] = (),
) -> torch.Tensor:
    """Return ‖x‖ₚ over all elements of all tensors, on all ranks of all groups.

    With m = max|x| the norm is ``m · (Σ (|x| / m)^p)^(1/p)``, and m for p = ∞. Dividing by m avoids overflow
    of the powers: the result is inf only if the norm itself is too large. The sum is in float64 if the device
    supports it. Every rank takes part in every reduction, also without tensors.

    Args:
        tensors: the part on this rank, real or complex, of any dtype and shape.
        p: the exponent, above 0, or infinity.
        device: the device of the reduction and of the result.
        groups: process groups to reduce over, one after the other.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    sizes = [tensor.detach().abs().to(device, dtype).reshape(-1) for tensor in tensors]
    flat = torch.cat([torch.zeros(1, device=device, dtype=dtype), *sizes])

    def everywhere(value: torch.Tensor, operation: Any) -> torch.Tensor:
        for group in groups:
            dist.all_reduce(value, op=operation, group=group)
        return value

    # A maximum over ranks may drop NaN, a sum does not.
    largest = everywhere(flat.nan_to_num(nan=0.0, posinf=math.inf).max(), dist.ReduceOp.MAX)
    if math.isinf(p):
        return largest + everywhere(flat[flat.isnan()].sum(), dist.ReduceOp.SUM)
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    powers = everywhere((flat / scale).pow(p).sum(), dist.ReduceOp.SUM)
    return scale * powers.pow(1 / p)
