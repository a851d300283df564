"""Whether the memory of a tensor still exists."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

#: Classes of tensors whose address is that of their memory.
PLAIN = (Tensor, nn.Parameter)


def check_memory(tensor: Tensor) -> None:
    """Raise RuntimeError unless the storage of a plain strided tensor has all of its elements.

    ``untyped_storage().resize_(0)``, as FSDP uses it, frees memory that a tensor still refers to. Some of
    torch's operators raise RuntimeError then; others, and kernels that get the address, end the process.
    """
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if type(tensor) not in PLAIN or tensor.is_sparse or tensor.is_meta or not tensor.numel():
        return
    last = tensor.storage_offset() + 1
    if tensor.is_contiguous():
        last += tensor.numel() - 1
    else:
        last += sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if last * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise RuntimeError(
            f"the memory of a tensor {tuple(tensor.shape)} has been freed or made smaller: its storage has "
            f"{tensor.untyped_storage().nbytes()} bytes"
        )
