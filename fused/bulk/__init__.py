"""Operations on thousands of tensors in one call, in C++ if the extension was built.

`native` is the extension with the functions in `module.cpp`. It is None if there was no compiler at install,
if torch lacks DLPack's C interface, or if the extension was built from older sources. Callers then use torch.
"""

import importlib
from collections.abc import Hashable
from typing import Any

from torch import Tensor

#: As in ``module.cpp``; increased when arguments or results of a function change.
REVISION = 4

native: Any
try:
    native = importlib.import_module("keyedopt.fused.bulk._bulk")
except ImportError:
    native = None
if native is not None and getattr(native, "revision", 0) != REVISION:
    native = None


def places(tensors: list[Tensor]) -> Hashable:
    """Return address, dtype, shape and strides of each tensor, to compare with those of another time."""
    found: bytes | None = None if native is None else native.places(tensors)
    if found is None:  # as for subclasses of tensors
        return tuple([(one.data_ptr(), one.dtype, one.shape, one.stride()) for one in tensors])
    return found
