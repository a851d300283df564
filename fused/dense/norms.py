"""Norms of gradients, in one pass over memory. On CUDA nothing synchronizes.

The norm of the norms of all tensors is the norm of all elements. So one call reduces each tensor, and the
short list of results is reduced in float64.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from keyedopt.fused.backends.native import INSTRUCTION_SET
from keyedopt.fused.bulk import native

_ROW = 1024  # the number of elements that are summed in float32; these sums are added in float64


def dense_cpu_norm(params: list[Tensor]) -> tuple[float, list[Tensor]] | None:
    """Return the 2-norm of the gradients of parameters, and the gradients, or None.

    The result is None unless all gradients are dense, contiguous and float32 on the CPU, each belongs to only
    one parameter, and no square overflows or underflows in float32.
    """
    grads: list[Tensor] | None = None if native is None else native.gradients(params)
    total = None if grads is None else _square_sum(grads)
    if grads is None or total is None or not 1e-24 < total < math.inf:
        return None
    return math.sqrt(total), grads


def _square_sum(tensors: list[Tensor]) -> float | None:
    """Return the sum of all squares, or None if the kernel does not support a tensor."""
    found: float | None = native.square_sum(
        tensors, torch.get_num_threads(), os.environ.get(INSTRUCTION_SET, "")
    )
    return found


def p_norm(tensors: Iterable[Tensor], p: float, device: torch.device, groups: Sequence[Any] = ()) -> Tensor:
    """Return ‖x‖ₚ of all elements, on all ranks of all groups, in float64 if the device supports it.

    Every rank takes part in every reduction, also without tensors. Finite elements never overflow or
    underflow: the result is inf only if the norm itself is too large.

    Args:
        tensors: strided, of any dtype.
        p: the exponent, above 0, or infinity.
        device: the device of the result.
        groups: process groups to reduce over, one after the other.
    """
    wide = torch.float32 if device.type == "mps" else torch.float64
    norms = [norm.to(device, wide) for norm in _norms(list(tensors), p)]
    return _combined_norm(torch.cat([torch.zeros(1, device=device, dtype=wide), *norms]), p, groups)


def _combined_norm(norms: Tensor, p: float, groups: Sequence[Any] = ()) -> Tensor:
    """Return ``m · (Σ (n / m)ᵖ)^(1/p)``, where m is the largest n: no power overflows the dtype."""
    top = _all_reduce(norms.masked_fill(norms.isnan(), 0.0).max(), dist.ReduceOp.MAX, groups)
    if p == math.inf:  # a maximum over ranks may drop NaN, a sum does not
        return top + _all_reduce(norms.where(norms.isnan(), 0.0).sum(), dist.ReduceOp.SUM, groups)
    unit = top.where((top > 0) & top.isfinite(), 1.0)
    total = _all_reduce(((norms / unit) ** p).sum(), dist.ReduceOp.SUM, groups)
    return unit * total ** (1 / p)


def _all_reduce(value: Tensor, operation: Any, groups: Sequence[Any]) -> Tensor:
    """Reduce a value in place over all ranks of all groups."""
    for ranks in groups:
        dist.all_reduce(value, operation, ranks)
    return value


def _norms(tensors: list[Tensor], p: float) -> list[Tensor]:
    """Return vectors of norms; each vector covers one or more tensors."""
    by_kind: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            tensor = tensor.detach().abs() if tensor.is_complex() else tensor.detach()
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    found = []
    for (device, dtype), some in by_kind.items():
        if dtype is torch.float64 or p not in (1.0, 2.0, math.inf) or device.type == "mps":
            found.append(_scaled_norms(some, p))
        elif device.type == "cpu":
            norms = _float32_norms(some, p)
            total = float(_combined_norm(norms.double(), p))
            # Outside this range squares of elements may overflow or underflow in float32.
            safe = 1e-12 < total < math.inf or math.isinf(p)
            found.append(norms if safe else _scaled_norms(some, p))
        else:
            found.append(torch.stack(torch._foreach_norm(some, p, dtype=torch.float64)))
    return found


def _float32_norms(tensors: list[Tensor], p: float) -> Tensor:
    """Return norms of CPU tensors, with float32 sums of at most `_ROW` squares."""
    if native is not None and p == 2.0:
        total = _square_sum(tensors)
        if total is not None:
            return torch.tensor([math.sqrt(total)], dtype=torch.float64)
    rows, rest = [], []
    for tensor in tensors:
        whole = tensor.numel() // _ROW * _ROW
        if not whole:
            rest.append(tensor)
            continue
        flat = tensor.reshape(-1)
        rows.append(torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), p, dim=1, dtype=torch.float32))
        if whole < len(flat):
            rest.append(flat[whole:])
    if rest:
        rows.append(torch.stack(torch._foreach_norm(rest, p, dtype=torch.float32)))
    return torch.cat(rows)


def _scaled_norms(tensors: list[Tensor], p: float) -> Tensor:
    """Return norms of tensors, each divided by its largest element first, so that no power overflows."""
    wide = torch.float32 if tensors[0].device.type == "mps" else torch.float64
    sizes = [tensor.abs().to(wide) for tensor in tensors]
    return torch.stack([_combined_norm(size.reshape(-1), p) for size in sizes])
