"""The gradients of parameters on this rank: strided tensors that may be written in place.

The other parts of a sharded gradient are on the ranks of its process groups.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from keyedopt.reference.memory import check_memory

Groups = tuple[Any, ...]  # process groups; the name of their type differs between builds of torch


def mesh_groups(param: torch.Tensor) -> Groups:
    """Return the process groups over which a `DTensor` gradient is spread; empty for other gradients."""
    spread = param.grad if isinstance(param.grad, DTensor) else param
    if not isinstance(spread, DTensor):
        return ()
    mesh, placements = spread.device_mesh, enumerate(spread.placements)
    return tuple(mesh.get_group(dim) for dim, kind in placements if not isinstance(kind, Replicate))


def gradient_parts(param: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of a gradient on this rank: strided tensors that may be written in place.

    A sparse gradient is coalesced first, so that every row is counted once. A gradient that is
    expanded over the same memory is copied. ``param.grad`` is then replaced by the result.

    Raises:
        ValueError: the gradient is a `DTensor` that has not been reduced.
        RuntimeError: the memory of the gradient was freed.
    """
    grad = param.grad
    if grad is None:
        return []
    for tensor in (grad._indices(), grad._values()) if grad.is_sparse else (grad,):
        check_memory(tensor)
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


def distinct_parts(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of all gradients; a tensor that is the gradient of two parameters counts once."""
    grads = {id(param.grad): param for param in params}
    return [part for param in grads.values() for part in gradient_parts(param)]


def rounded(norm: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm in float64 if a gradient is, in float32 otherwise: float16 would overflow."""
    double = any(part.dtype in (torch.float64, torch.complex128) for part in parts)
    return norm.to(torch.float64 if double else torch.float32)
