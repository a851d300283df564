# mypy: ignore-errors
# ruff: noqa: N803
# Kernels are compiled from their source: annotations of tensors mean nothing there, constants are capitals,
# and a branch on a constant is taken when it is compiled.
"""The alarm of a device: a word that says what was wrong with lookups, until the host asks for it.

Kernels see bad row numbers and offsets where they read them, and read nothing by them. They set a bit of the
word, and as long as there is one, no kernel writes to a table, its state or its count of steps.
"""

import triton
import triton.language as tl

BAD_VALUES = tl.constexpr(1)
BAD_OFFSETS = tl.constexpr(2)


@triton.jit
def raise_alarm(alarm, wrong, BIT: tl.constexpr):
    """Set a bit if anything is wrong, and the number behind the alarm to 0, see `alarms.sound_of`."""
    if tl.max(wrong.to(tl.int32), 0) != 0:
        tl.atomic_or(alarm, BIT, sem="relaxed")
        tl.store(alarm + 2, 0)


@triton.jit
def silent(alarm, SIZE: tl.constexpr):
    """Return whether there is no alarm, the same in all warps of a program, which have SIZE elements.

    One that another stream raises just then could else send some warps away, and the others on with what
    these have not written: rows would be updated with numbers that mean nothing.
    """
    return tl.max(tl.load(alarm + tl.zeros((SIZE,), tl.int32)), 0) == 0
