"""State at its start: where it is, and how it is spread."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from keyedopt.fused.bulk import native


def counter(param: Tensor) -> Tensor:
    """Return a count of steps: float64, which torch's own optimizers can take over."""
    return torch.zeros((), dtype=torch.float64, device=count_device(param))


def count_device(param: Tensor) -> torch.device:
    """Return where a parameter's count is: where a step can read it without synchronizing."""
    return param.device if param.device.type == "cuda" else torch.device("cpu")


def full_state(param: Tensor, start: float = 0.0) -> Tensor:
    """Return a state of one number for each of the parameter's, where it pays on large pages of memory.

    A step goes through both, so the parameter's own memory is put together into large pages, too.
    """
    if native is None or param.device.type != "cpu" or isinstance(param, DTensor):
        return torch.full_like(param, start, requires_grad=False)
    native.gather_pages(param)
    made = torch.empty_like(param, requires_grad=False)
    native.large_pages(made)  # before it is written to: the system gives a page its size then
    return made.fill_(start)


def row_state(
    param: Tensor, start: float = 0.0, columns: int | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return a state of one number a row: (rows,), or (rows, columns); of a DTensor, with its rows."""
    shape = (len(param),) if columns is None else (len(param), columns)
    if not isinstance(param, DTensor):
        return param.new_full(shape, start, dtype=dtype).detach()
    if any(kind.is_partial() or kind.is_shard(1) for kind in param.placements):
        return param.new_full(shape, start, dtype=dtype).detach()
    local = param.to_local()
    return DTensor.from_local(
        local.new_full((len(local), *shape[1:]), start, dtype=dtype),
        param.device_mesh,
        param.placements,
        shape=torch.Size(shape),
        stride=(1,) * len(shape),
    )
