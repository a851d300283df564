"""The fused implementation in a process whose C++ extensions were not built, as a target."""

import sys

from keyedopt.conformance.targets import builtin

#: The compiled modules; None makes an import raise ImportError.
EXTENSIONS = ("keyedopt.fused.bulk._bulk", "keyedopt.fused.backends.native._kernels")
sys.modules.update(dict.fromkeys(EXTENSIONS))

#: The same, in a process that has imported this before `keyedopt.fused`.
IMPLEMENTATION = builtin.fused
