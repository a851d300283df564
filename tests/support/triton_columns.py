"""A kernel that does nothing but look for columns, for `test_triton_far`."""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.arithmetic import column_of


@triton.jit
def columns_of(positions, words, found, SIZE: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: N803
    """Write the column of each position."""
    at = tl.arange(0, SIZE)
    tl.store(found + at, column_of(tl.load(positions + at), words, COLUMNS))
