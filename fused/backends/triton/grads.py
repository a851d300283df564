"""Gradients of outputs, as kernels read them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keyedopt.fused.backends.memory import address
from keyedopt.fused.backends.triton.device_buffers import alignment, pack_rows, to_device
from keyedopt.fused.backends.triton.groups import DTYPES, Group


class Grads(NamedTuple):
    """The gradients of some lookups, as kernels read them.

    Args:
        tensors: keep the memory.
        buffer: columns of `GRAD_FIELDS`.
        key: dtype, alignment in bytes, unit of strides.
    """

    tensors: list[Tensor]
    buffer: Tensor
    key: tuple[torch.dtype, int, int]

    @property
    def constants(self) -> dict[str, Any]:
        """The constants of kernels."""
        dtype, align, unit = self.key
        return {"GRAD": DTYPES[dtype], "GRAD_ALIGN": align, "GRAD_UNIT": unit}


def readable(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients that kernels can read, copied if need be: of one dtype, with contiguous rows."""
    same = all(grad.dtype is grads[0].dtype for grad in grads)
    return [readable_one(grad if same else grad.float()) for grad in grads]


def readable_one(grad: Tensor) -> Tensor:
    """Return a gradient that kernels can read, copied if need be."""
    grad = grad if grad.dtype in DTYPES else grad.float()
    grad = grad.detach() if grad.requires_grad else grad
    return grad if grad.stride(1) == 1 else grad.contiguous()


def pack_grads(grads: Sequence[Tensor], group: Group) -> Grads:
    """Return the addresses of the gradients; those that kernels cannot read are copied."""
    tensors = readable(grads)
    strides = [grad.stride(0) for grad in tensors]
    align = alignment([grad.data_ptr() for grad in tensors if grad.numel()], 16)
    unit = alignment(strides, 8)
    rows = [[address(grad) for grad in tensors], [stride // unit for stride in strides]]
    return Grads(
        tensors, to_device(pack_rows(rows, begins=()), group.device), (tensors[0].dtype, align, unit)
    )
