"""The memory of a tensor, for kernels that get its address."""

from collections.abc import Iterable

from torch import Tensor, nn

from keyedopt.fused.backends.interface import Lookup

#: Classes of tensors whose address is that of their memory.
PLAIN = (Tensor, nn.Parameter)
#: Addresses below this may be offsets in a storage that has been freed; most systems place no memory there.
LOWEST = 1 << 40


def check_memory(tensor: Tensor) -> None:
    """Raise RuntimeError unless the storage of a plain strided tensor has all of its elements.

    ``untyped_storage().resize_(0)``, as FSDP uses it, frees memory that a tensor still refers to. torch's
    operators raise RuntimeError then; a kernel that got the address would end the process.
    """
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


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill its memory without gaps, in any order of its dimensions.

    >>> from torch import ones
    >>> is_dense(ones(3, 4).t()), is_dense(ones(3, 4)[:, :2])
    (True, False)
    """
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def address(tensor: Tensor) -> int:
    """Return the address of a plain strided tensor; raise RuntimeError if its memory has been freed."""
    found = tensor.data_ptr()
    if found < LOWEST:
        check_memory(tensor)
    return found


def check_lookups(lookups: Iterable[Lookup]) -> None:
    """Raise RuntimeError if memory of an input has been freed: some of torch's operators would read it."""
    for lookup in lookups:
        for tensor in (lookup.values, lookup.offsets, lookup.weights, lookup.grad):
            if tensor is not None:
                check_memory(tensor)
