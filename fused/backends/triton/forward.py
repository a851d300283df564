# mypy: ignore-errors
# ruff: noqa: N803, D417
# Triton compiles this source: names of constants are in capitals; branches on them are taken at compile time.
"""The kernels of the forward pass: look up and pool all lookups of a group of tables in one launch."""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.arithmetic import add_exactly, column_of_program, pointer, total_of
from keyedopt.fused.backends.triton.error_flag import BAD_OFFSETS, BAD_VALUES, set_flag
from keyedopt.fused.backends.triton.lookup_fields import (
    BAGS,
    COUNT,
    MEAN,
    OFFSETS,
    ORIGIN,
    POOL_PROGRAM,
    PROGRAM,
    ROWS_AT,
    VALUES,
    WEIGHTS,
)


@triton.jit
def pool(
    lookups,
    tables,
    outputs,
    flag,
    LOOKUPS: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGN: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Write ROWS rows of the output of one lookup: Σ cᵢ rᵢ, over the number of values for the mean.

    Args:
        lookups: columns of `LOOKUP_FIELDS`.
        tables: for each lookup, address of the weight and width in units.
        outputs: for each lookup, columns of `GRAD_FIELDS` for its output (bags, width).
        flag: see `error_flag`; invalid bags and rows count as 0.
    """
    program = tl.program_id(0)
    lookup = column_of_program(lookups + POOL_PROGRAM * LOOKUPS, LOOKUPS)
    fields = lookups + lookup
    top = (program - tl.load(fields + POOL_PROGRAM * LOOKUPS)) * ROWS
    bag = top + tl.arange(0, ROWS)
    bags = tl.load(fields + BAGS * LOOKUPS)
    live = bag < bags
    rows = tl.load(fields + ROWS_AT * LOOKUPS)
    wrong = bag < 0
    values = tl.load(fields + VALUES * LOOKUPS).to(tl.pointer_type(tl.int64))
    weight = pointer(tables + lookup, True, WEIGHT, ALIGN)
    width = tl.load(tables + LOOKUPS + lookup) * UNIT
    columns = tl.arange(0, WIDTH)
    inside = (columns < width)[None, :]
    first = bag
    length = tl.where(live, 1, 0).to(tl.int64)
    address = tl.load(fields + OFFSETS * LOOKUPS)
    if address != 0:
        offsets = address.to(tl.pointer_type(tl.int64))
        first = tl.load(offsets + bag, mask=live, other=0)
        end = tl.load(offsets + bag + 1, mask=live, other=0)
        origin = tl.load(fields + ORIGIN * LOOKUPS)
        stop = origin + tl.load(fields + COUNT * LOOKUPS)
        sound = (first >= origin) & (first <= end) & (end <= stop)
        sound &= ((bag > 0) | (first == origin)) & ((bag < bags - 1) | (end == stop))
        set_flag(flag, live & (sound == 0), BAD_OFFSETS)
        length = tl.where(live & sound, end - first, 0)
    factors = tl.load(fields + WEIGHTS * LOOKUPS)
    weighted = (factors + tl.zeros_like(length)) != 0  # by bag: the interpreter of 3.9 takes no scalar mask
    high = tl.zeros((ROWS, WIDTH), tl.float32)
    low = tl.zeros((ROWS, WIDTH), tl.float32)
    longest = tl.max(length, 0)
    for done in range(0, longest, UNROLL):
        batch = tl.zeros((ROWS, WIDTH), tl.float32)
        for one in tl.static_range(UNROLL):
            more = done + one < length
            at = first + (done + one)
            row = tl.load(values + at, mask=more, other=0)
            bad = more & ((row < 0) | (row >= rows))
            wrong |= bad
            more &= bad == 0
            place = (row * width)[:, None] + columns[None, :]
            x = tl.load(weight + place, mask=more[:, None] & inside, other=0.0).to(tl.float32)
            if SCALED:
                there = more & weighted
                x = x * tl.load(factors.to(tl.pointer_type(tl.float32)) + at, mask=there, other=1.0)[:, None]
            batch += x
        high, low = add_exactly(high, low, batch)
    set_flag(flag, wrong, BAD_VALUES)
    total = total_of(high, low)
    if SCALED:
        divided = tl.load(fields + MEAN * LOOKUPS) != 0
        share = tl.where(divided, tl.maximum(length, 1), 1).to(tl.float32)
        total = tl.div_rn(total, tl.broadcast_to(share[:, None], total.shape))
    out = pointer(outputs + lookup, True, tl.float32, ALIGN)
    # `top` is int64. ROWS is 1, or ROWS · WIDTH at most 256, of at most 2²⁰ lookups: no int32 overflow
    stride = tl.load(outputs + LOOKUPS + lookup).to(tl.int32) * UNIT
    tl.store(
        out + (top * stride + tl.arange(0, ROWS) * stride)[:, None] + columns[None, :],
        total,
        mask=live[:, None] & inside,
    )


@triton.jit
def check_offsets(lookups, flag, LOOKUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Check BLOCK offsets of one lookup without pooling, which `pool` does not read.

    Args:
        lookups: columns of `LOOKUP_FIELDS`.
        flag: see `error_flag`.
    """
    program = tl.program_id(0)
    lookup = column_of_program(lookups + PROGRAM * LOOKUPS, LOOKUPS)
    fields = lookups + lookup
    bag = (program - tl.load(fields + PROGRAM * LOOKUPS)) * BLOCK + tl.arange(0, BLOCK)
    bags = tl.load(fields + BAGS * LOOKUPS)
    offsets = tl.load(fields + OFFSETS * LOOKUPS).to(tl.pointer_type(tl.int64))
    here = tl.load(offsets + bag, mask=bag <= bags, other=0)
    before = tl.load(offsets + bag - 1, mask=(bag > 0) & (bag <= bags), other=0)
    wrong = (here < before) | ((bag == 0) & (here != 0))
    wrong |= (bag == bags) & (here != tl.load(fields + COUNT * LOOKUPS))
    set_flag(flag, wrong & (bag <= bags), BAD_OFFSETS)
