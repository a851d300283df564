"""Helpers for cases of clipping: parameters with given gradients, distributed tensors."""

from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import expect, expect_close
from keyedopt.conformance.suite.support.device import tensor, the_device, zeros


def zeros_with_grads(*grads: list[float]) -> dict[str, Any]:
    """Make parameters of zeros with these gradients."""
    params: dict[str, Any] = {}
    for index, grad in enumerate(grads):
        params[f"p{index}"] = torch.nn.Parameter(zeros(len(grad)))
        params[f"p{index}"].grad = tensor(grad)
    return params


def spread(tensor: torch.Tensor, placement: str, ranks: int = 1) -> Any:
    """Make a DTensor whose local part on this rank is the tensor, on a mesh with some ranks per dimension.

    The mesh has one dimension for each word of the placement: ``"replicate shard"`` shards within groups.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements = {"shard": Shard(0), "replicate": Replicate()}
    words = placement.split()
    mesh = init_device_mesh(the_device().type, (ranks,) * len(words))
    return DTensor.from_local(tensor, mesh, [placements[word] for word in words], run_check=False)


def local(tensor: Any) -> torch.Tensor:
    """Return the local part of a DTensor, or the tensor itself."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def expect_scaled(seen: Any, grads: list[list[float]], bound: float, norm: float) -> None:
    """Expect gradients multiplied by one factor between bound / (norm + 1e-6) and bound / norm."""
    flat = torch.tensor([element for grad in grads for element in grad], dtype=torch.float64)
    have = torch.cat([one.detach().cpu().flatten() for one in seen])
    largest = int(flat.abs().argmax())
    factor = float(have[largest]) / float(flat[largest])
    slack = 8 * torch.finfo(have.dtype).eps
    low, high = bound / (norm + 1e-6) * (1 - slack), bound / norm * (1 + slack)
    expect(low <= factor <= high, f"a factor between {low} and {high}", factor)
    expect_close(have, flat * factor, "received gradients", ulps=8)
