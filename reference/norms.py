"""The p-norm of gradients, whatever their layout and wherever their parts are.

Everything here looks at the part of a gradient that this rank holds, as strided tensors that may be
written in place, and at the process groups over which the rest is spread.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate

Groups = tuple[Any, ...]  # process groups; torch names their type differently from build to build


def mesh_groups(param: torch.Tensor) -> Groups:
    """Return the process groups over which a `DTensor` gradient is spread; none for others."""
    spread = param.grad if isinstance(param.grad, DTensor) else param
    if not isinstance(spread, DTensor):
        return ()
    mesh, placements = spread.device_mesh, enumerate(spread.placements)
    return tuple(mesh.get_group(dim) for dim, kind in placements if not isinstance(kind, Replicate))


def gradient_parts(param: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradient of a parameter on this rank: strided tensors, to be written in place.

    A sparse gradient is coalesced first, so that no row is counted in pieces, and one that is
    expanded over the same memory gets memory of its own; ``param.grad`` is replaced by the result.

    Raises:
        ValueError: the gradient is a `DTensor` whose parts are still to be added up.
    """
    grad = param.grad
    if grad is None:
        return []
    if isinstance(grad, DTensor):
        if any(kind.is_partial() for kind in grad.placements):
            raise ValueError("a DTensor gradient with Partial placement cannot be clipped: reduce it")
        local: Any = grad.to_local()
        # torchrec keeps several shards of one table in a wrapper with this method.
        return list(local.local_shards()) if hasattr(local, "local_shards") else [local]
    if grad.layout == torch.sparse_coo:
        if not grad.is_coalesced():
            grad = param.grad = grad.coalesce()
        return [grad._values()]
    if grad.layout != torch.strided:
        return [grad.values()]
    sizes = zip(grad.shape, grad.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in sizes):
        grad = param.grad = grad.contiguous()
    return [grad]


def p_norm(
    tensors: Iterable[torch.Tensor],
    p: float,
    device: torch.device,
    groups: Sequence[Any] = (),
) -> torch.Tensor:
    """Return ‖x‖ₚ over all elements of all tensors, on all ranks of all groups.

    With m = max|x| the norm is ``m · (Σ (|x| / m)^p)^(1/p)``, and m for p = ∞. No power of an
    element is formed, so what overflows is only a norm that is too large itself. The sum is in
    float64 where the device has it. Every rank takes part in every reduction, also without tensors.

    Args:
        tensors: the part on this rank, real or complex, of any dtype and shape.
        p: the exponent, above 0, or infinity.
        device: where to reduce.
        groups: process groups to reduce over, one after the other.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    sizes = [tensor.detach().abs().to(device, dtype).reshape(-1) for tensor in tensors]
    flat = torch.cat([torch.zeros(1, device=device, dtype=dtype), *sizes])

    def everywhere(value: torch.Tensor, operation: Any) -> torch.Tensor:
        for group in groups:
            dist.all_reduce(value, op=operation, group=group)
        return value

    # NaN goes through the sum: a maximum over ranks may lose it.
    largest = everywhere(flat.nan_to_num(nan=0.0, posinf=math.inf).max(), dist.ReduceOp.MAX)
    if math.isinf(p):
        return largest + everywhere(flat[flat.isnan()].sum(), dist.ReduceOp.SUM)
    scale = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    powers = everywhere((flat / scale).pow(p).sum(), dist.ReduceOp.SUM)
    return scale * powers.pow(1 / p)


def distinct_parts(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of all gradients; a tensor that is the gradient of two parameters, once."""
    grads = {id(param.grad): param for param in params}
    return [part for param in grads.values() for part in gradient_parts(param)]


def rounded(norm: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm in float64 if a gradient is, in float32 otherwise: float16 would overflow."""
    double = any(part.dtype in (torch.float64, torch.complex128) for part in parts)
    return norm.to(torch.float64 if double else torch.float32)
