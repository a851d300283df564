"""The memory of a tensor, for kernels that get its address."""

from collections.abc import Iterable

from torch import Tensor

from keyedopt.fused.backends.interface import Lookup
from keyedopt.reference.memory import check_memory

#: Addresses below this may be offsets in a storage that has been freed; most systems place no memory there.
LOWEST = 1 << 40


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
