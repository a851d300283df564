"""Gradients of outputs, as kernels read them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from keyedopt.fused.backends.triton.device_buffers import alignment, columns_for, pack_rows, to_device
from keyedopt.fused.backends.triton.groups import DTYPES, Group


@dataclass(frozen=True)
class Grads:
    """The gradients of some lookups, as kernels read them: buffer, dtype, alignment in bytes and elements."""

    tensors: list[Tensor]
    buffer: Tensor
    constants: dict[str, Any]


def pack_grads(grads: Sequence[Tensor], group: Group) -> Grads:
    """Return the addresses of the gradients; those that kernels cannot read are copied."""
    same = len({grad.dtype for grad in grads}) == 1 and grads[0].dtype in DTYPES
    tensors = [(grad if same else grad.float()).detach() for grad in grads]
    tensors = [grad if grad.stride(1) == 1 else grad.contiguous() for grad in tensors]
    strides = [grad.stride(0) for grad in tensors]
    align = alignment([grad.data_ptr() for grad in tensors if grad.numel()], 16)
    unit = alignment(strides, 8)
    rows = [[grad.data_ptr() for grad in tensors], [stride // unit for stride in strides]]
    buffer = pack_rows(rows)
    buffer[: columns_for(len(grads))] = [*rows[0], *[0] * (columns_for(len(grads)) - len(grads))]
    constants = {"GRAD": DTYPES[tensors[0].dtype], "GRAD_ALIGN": align, "GRAD_UNIT": unit}
    return Grads(tensors, to_device(buffer, group.device), constants)
