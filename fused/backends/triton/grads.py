"""Gradients of outputs, as kernels read them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from keyedopt.fused.backends.triton.device_buffers import alignment, pack_rows, to_device
from keyedopt.fused.backends.triton.groups import DTYPES, Group


@dataclass(frozen=True)
class Grads:
    """The gradients of some lookups, as kernels read them.

    Args:
        tensors: keep the memory.
        buffer: columns of `GRAD_FIELDS`.
        constants: of kernels: dtype, alignment in bytes, unit of strides.
        key: determines the constants.
    """

    tensors: list[Tensor]
    buffer: Tensor
    constants: dict[str, Any]
    key: Hashable

    @classmethod
    def of(cls, tensors: list[Tensor], buffer: Tensor, align: int, unit: int) -> "Grads":
        """Return gradients of one dtype, with alignment and unit of strides."""
        dtype = tensors[0].dtype
        constants = {"GRAD": DTYPES[dtype], "GRAD_ALIGN": align, "GRAD_UNIT": unit}
        return cls(tensors, buffer, constants, (dtype, align, unit))


def readable(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients that kernels can read, copied if need be: of one dtype, with contiguous rows."""
    same = len({grad.dtype for grad in grads}) == 1 and grads[0].dtype in DTYPES
    tensors = [(grad if same else grad.float()).detach() for grad in grads]
    return [grad if grad.stride(1) == 1 else grad.contiguous() for grad in tensors]


def pack_grads(grads: Sequence[Tensor], group: Group) -> Grads:
    """Return the addresses of the gradients; those that kernels cannot read are copied."""
    tensors = readable(grads)
    strides = [grad.stride(0) for grad in tensors]
    align = alignment([grad.data_ptr() for grad in tensors if grad.numel()], 16)
    unit = alignment(strides, 8)
    rows = [[grad.data_ptr() for grad in tensors], [stride // unit for stride in strides]]
    return Grads.of(tensors, to_device(pack_rows(rows, begins=()), group.device), align, unit)
