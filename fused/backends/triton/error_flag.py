# mypy: ignore-errors
# ruff: noqa: N803
# Triton compiles this source: names of constants are in capitals; branches on them are taken at compile time.
"""The error flag of a device: a number with a bit for each kind of invalid lookup, until the host reads it.

Kernels check row numbers and offsets before they read memory by them, and set a bit if they are invalid.
While a bit is set, no kernel writes to a table, its state or its step count. The atomic needs no order:
kernels that read the flag are later launches on the same stream, or wait for an event of the stream that set
it. A launch on another stream that runs meanwhile may see it or not; it reads no memory by invalid lookups.
"""

import triton
import triton.language as tl

BAD_VALUES = tl.constexpr(1)
BAD_OFFSETS = tl.constexpr(2)


@triton.jit
def set_flag(flag, wrong, BIT: tl.constexpr):
    """Set a bit if anything is wrong, and `device_flags.step_increment`, which is behind the flag, to 0."""
    if tl.max(wrong.to(tl.int32), 0) != 0:
        tl.atomic_or(flag, BIT, sem="relaxed")
        tl.store(flag + 2, 0)


@triton.jit
def no_error(flag, SIZE: tl.constexpr):
    """Return whether the flag is 0; the same in all warps of a program, which have SIZE elements.

    If each warp read the flag by itself while another stream sets it, some warps could return, and the others
    would read memory that these warps did not write.
    """
    return tl.max(tl.load(flag + tl.zeros((SIZE,), tl.int32)), 0) == 0
