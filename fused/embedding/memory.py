"""Memory for tables and their state: in large pages, where the system has them.

A step reads rows from all over a table. With pages of 4 KiB nearly every row costs a walk through the page
tables besides; with pages of 2 MiB hardly any does.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

#: Bytes of a large page; less memory than this is left as it is.
LARGE = 2 << 20
_HUGEPAGE = 14  # MADV_HUGEPAGE of Linux


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Return memory that holds anything, as `torch.empty` does."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if type(tensor) is Tensor and tensor.device.type == "cpu":  # others have no address, or not here
        _advise(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return tensor


def _advise(address: int, size: int) -> None:
    """Ask for large pages below some memory; a system that refuses leaves it as it is."""
    begin, end = (
        -(-address // mmap.PAGESIZE) * mmap.PAGESIZE,
        (address + size) // mmap.PAGESIZE * mmap.PAGESIZE,
    )
    advise = _madvise()
    if advise is not None and end - begin >= LARGE:
        advise(begin, end - begin, _HUGEPAGE)


@cache
def _madvise() -> Callable[[int, int, int], Any] | None:
    """Return the function of the C library, where there is one that has large pages."""
    if sys.platform != "linux":
        return None
    try:
        found = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    found.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found
