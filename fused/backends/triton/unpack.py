# mypy: ignore-errors
# ruff: noqa: N803, D417
# Triton compiles this source: names of constants are in capitals; branches on them are taken at compile time.
"""The kernel that splits a packed input into lookups, so that the host need not know where a key begins."""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.error_flag import BAD_OFFSETS, set_flag
from keyedopt.fused.backends.triton.layout import NEVER
from keyedopt.fused.backends.triton.lookup_fields import (
    BAGS,
    BASE,
    COUNT,
    MEAN,
    OFFSETS,
    ORIGIN,
    POOL_PROGRAM,
    PROGRAM,
    ROWS_AT,
    START,
    VALUES,
    WEIGHTS,
)

NONE = tl.constexpr(NEVER)


@triton.jit(do_not_specialize=["values", "weights", "n", "bags", "used"])
def unpack(
    lookups,
    flag,
    fixed,
    offsets,
    values,
    weights,
    n,
    bags,
    used,
    LOOKUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the columns of the lookups; one program.

    If a key does not end where the next begins, the error flag is set, and the first lookup gets all values.

    Args:
        lookups: out: columns of `LOOKUP_FIELDS`.
        flag: see `error_flag`.
        fixed: columns of `PACKED_FIELDS`.
        offsets: (used · bags + 1,)
        values, weights: addresses.
        n: number of values.
        bags: of each key.
        used: number of keys.
        BLOCK, ROWS: values that a program of `write_keys` does, and bags that one of `pool` does.
    """
    column = tl.arange(0, LOOKUPS)
    live = column < used
    key = tl.load(fixed + column)
    begin = tl.load(offsets + key * bags, mask=live, other=0)
    end = tl.load(offsets + (key + 1) * bags, mask=live, other=0)
    wrong = (begin < 0) | (begin > end) | (end > n) | ((key == 0) & (begin != 0))
    wrong = live & (wrong | ((key == used - 1) & (end != n)))
    set_flag(flag, wrong, BAD_OFFSETS)
    sound = tl.max(wrong.to(tl.int32), 0) == 0
    begin = tl.where(live & sound, begin, 0)
    count = tl.where(live & sound, end - begin, 0)
    count = tl.where(sound | (column > 0), count, n)  # so that every key is written, and sorted once
    programs = (count + BLOCK - 1) // BLOCK
    at = lookups + column
    tl.store(at + PROGRAM * LOOKUPS, tl.where(live, tl.cumsum(programs, 0) - programs, NONE))
    tl.store(at + START * LOOKUPS, tl.where(live, tl.cumsum(count, 0) - count, NONE))
    tl.store(at + COUNT * LOOKUPS, count)
    tl.store(at + BAGS * LOOKUPS, tl.where(live, bags, 0).to(tl.int64))
    tl.store(at + VALUES * LOOKUPS, tl.where(live, values, 0).to(tl.int64))
    address = offsets.to(tl.int64, bitcast=True) + key * bags * 8
    tl.store(at + OFFSETS * LOOKUPS, tl.where(live, address, 0))
    tl.store(at + WEIGHTS * LOOKUPS, tl.where(live, weights, 0).to(tl.int64))
    tl.store(at + BASE * LOOKUPS, tl.load(fixed + LOOKUPS + column))
    tl.store(at + MEAN * LOOKUPS, tl.load(fixed + 2 * LOOKUPS + column))
    tl.store(at + ROWS_AT * LOOKUPS, tl.load(fixed + 3 * LOOKUPS + column))
    tl.store(at + ORIGIN * LOOKUPS, begin)
    first = column.to(tl.int64) * ((bags + ROWS - 1) // ROWS)
    tl.store(at + POOL_PROGRAM * LOOKUPS, tl.where(live, first, NONE))
