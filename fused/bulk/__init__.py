"""Operations on thousands of tensors in one call, in C++ if the extension was built.

`native` is the extension with the functions in `module.cpp`. It is None if there was no compiler at install,
if torch lacks DLPack's C interface, or if the extension was built from older sources. Callers then use torch.
"""

import importlib
from collections.abc import Hashable
from operator import is_
from typing import Any

from torch import Tensor, nn

#: As in ``module.cpp``; increased when arguments or results of a function change.
REVISION = 5

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


def held(modules: dict[str, nn.Module], name: str, tensors: list[Tensor]) -> bool:
    """Return whether the parameter `name` of each module is the tensor in the list."""
    if native is not None:
        return bool(native.held(modules, name, tensors))
    present = [module._parameters.get(name) for module in modules.values()]
    return len(present) == len(tensors) and all(map(is_, present, tensors))


def count_trained(tensors: list[Tensor]) -> int:
    """Return how many of the tensors require a gradient."""
    return sum(one.requires_grad for one in tensors) if native is None else native.count_trained(tensors)
