"""Allocate tables and state: their device, their pages, and their shards."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from keyedopt.fused.bulk import native

#: The largest value of M_MMAP_THRESHOLD in glibc, in bytes.
FRESH = 32 << 20


def count_device(param: Tensor) -> torch.device:
    """Return the device on which a step reads the count of a parameter without synchronizing."""
    return param.device if param.device.type == "cuda" else torch.device("cpu")


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Return uninitialized memory as `torch.empty` does, on large pages if the system has them."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if native is not None and type(made) is Tensor and made.is_cpu:
        native.large_pages(made)  # before the first write, which fixes the size of the pages
    return made


def empty_output(rows: int, width: int) -> Tensor:
    """Return uninitialized memory for an output (rows, width) in float32 on the CPU, for one step.

    The C library takes `FRESH` bytes or more from the system each time. Without large pages each step would
    have a page fault for each 4 KiB.
    """
    if rows * width * 4 < FRESH:
        return torch.empty(rows, width, dtype=torch.float32, device="cpu")
    return empty((rows, width), torch.float32, "cpu")


def full_state(param: Tensor, start: float = 0.0) -> Tensor:
    """Return a state with one number for each element of a parameter, on large pages if that is faster.

    The memory of the parameter is moved to large pages, too, because a step reads both.
    """
    if native is None or param.device.type != "cpu" or isinstance(param, DTensor):
        return torch.full_like(param, start, requires_grad=False)
    native.gather_pages(param)
    made = torch.empty_like(param, requires_grad=False)
    native.large_pages(made)  # before the first write, which fixes the size of the pages
    return made.fill_(start)


def row_state(param: Tensor, *columns: int, start: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
    """Return a state (rows,) or (rows, columns), sharded as the rows of the parameter."""
    shape = (len(param), *columns)
    if not isinstance(param, DTensor) or any(
        kind.is_partial() or kind.is_shard(1) for kind in param.placements
    ):
        return param.detach().new_full(shape, start, dtype=dtype)
    local = param.to_local()
    return DTensor.from_local(
        local.new_full((len(local), *columns), start, dtype=dtype),
        param.device_mesh,
        param.placements,
        shape=torch.Size(shape),
        stride=(1,) * len(shape),
    )
