"""Operations on thousands of tensors in one call, in C++ if the extension was built.

`native` is the extension with the functions in `module.cpp`. It is None if there was no compiler at install,
if torch lacks DLPack's C interface, or if the extension was built from older sources. Callers then use torch.
"""

import importlib
from typing import Any

#: As in ``module.cpp``; increased when arguments or results of a function change.
REVISION = 2

native: Any
try:
    native = importlib.import_module("keyedopt.fused.bulk._bulk")
except ImportError:
    native = None
if native is not None and getattr(native, "revision", 0) != REVISION:
    native = None
