"""What is done to thousands of tensors at once, in C++ where it could be built.

`native` has the functions that `module.cpp` lists; None without a compiler at install, or with a torch whose
tensors DLPack's C interface does not show, or built from older sources than these. Callers then do the same
through torch.
"""

import importlib
from typing import Any

#: As in ``module.cpp``; raised with what functions take or return.
REVISION = 2

native: Any
try:
    native = importlib.import_module("keyedopt.fused.bulk._bulk")
except ImportError:
    native = None
if native is not None and getattr(native, "revision", 0) != REVISION:
    native = None
