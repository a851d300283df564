# mypy: ignore-errors
# ruff: noqa: N803, D417
# Triton compiles this source: names of constants are in capitals; branches on them are taken at compile time.
"""Kernels that turn lookups into runs: keys that number the rows of all tables, and the begins of runs.

Neither kernel needs gradients, so both run in the forward pass. `radix` sorts the keys between them.
"""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.arithmetic import column_of, column_of_program
from keyedopt.fused.backends.triton.error_flag import BAD_VALUES, set_flag
from keyedopt.fused.backends.triton.lookup_fields import (
    BAGS,
    BASE,
    COUNT,
    MEAN,
    OFFSETS,
    ORIGIN,
    PROGRAM,
    ROWS_AT,
    START,
    VALUES,
    WEIGHTS,
)

#: Registers of a thread: few enough for 32 warps on a multiprocessor, which hide the latency of loads.
REGISTERS = 64


@triton.jit
def bag_of(position, offsets, bags, steps, live):
    """Return the last bag that begins at a position or before it, by bisection in `steps` steps.

    Invalid offsets cause no read outside of the offsets. There are fewer than 2³⁰ bags.
    """
    low = tl.zeros(position.shape, tl.int32)
    high = low + tl.maximum(bags, 1).to(tl.int32)
    for _ in range(steps):
        middle = (low + high) >> 1
        right = tl.load(offsets + middle, mask=live, other=0) <= position
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit
def place_of(which, live, lookups, shift, steps, LOOKUPS: tl.constexpr, SCALED: tl.constexpr):
    """Return place and scale of some values.

    The bits of a place from `shift` on are the lookup; the bits below are the bag, or the value without
    pooling. The scale is the factor of the gradient of the bag.

    Args:
        which: indices of the values, counted over all lookups.
        lookups: columns of `LOOKUP_FIELDS`.
        shift: number of bits of a bag.
        steps: of a bisection of the bags; 0 if no lookup is pooled.
    """
    lookup = column_of(which, lookups + START * LOOKUPS, LOOKUPS)
    fields = lookups + lookup
    index = which.to(tl.int64) - tl.load(fields + START * LOOKUPS, mask=live, other=0)
    index += tl.load(fields + ORIGIN * LOOKUPS, mask=live, other=0)
    address = tl.load(fields + OFFSETS * LOOKUPS, mask=live, other=0)
    offsets = address.to(tl.pointer_type(tl.int64))
    pooled = live & (address != 0)
    bags = tl.load(fields + BAGS * LOOKUPS, mask=live, other=1)
    bag = tl.where(pooled, bag_of(index, offsets, bags, steps, pooled).to(tl.int64), index)
    scale = tl.full(which.shape, 1.0, tl.float32)
    if SCALED:
        divided = pooled & (tl.load(fields + MEAN * LOOKUPS, mask=live, other=0) != 0)
        end = tl.load(offsets + bag + 1, mask=divided, other=1)
        length = end - tl.load(offsets + bag, mask=divided, other=0)
        scale = tl.div_rn(scale, tl.maximum(length, 1).to(tl.float32))
        address = tl.load(fields + WEIGHTS * LOOKUPS, mask=live, other=0)
        weights = address.to(tl.pointer_type(tl.float32))
        scale = scale * tl.load(weights + index, mask=live & (address != 0), other=1.0)
    return bag + (lookup.to(tl.int64) << shift), scale


@triton.jit(do_not_specialize=["shift", "steps", "clear"])
def write_keys(
    lookups,
    flag,
    keys,
    places,
    scales,
    totals,
    status,
    shift,
    steps,
    clear,
    LOOKUPS: tl.constexpr,
    PLACES: tl.constexpr,
    SCALED: tl.constexpr,
    PADDING: tl.constexpr,
    PASSES: tl.constexpr,
    BITS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the keys of BLOCK values of one lookup, and the counts of digits that the sort needs.

    Args:
        lookups: columns of `LOOKUP_FIELDS`.
        flag: see `error_flag`.
        keys: (N,) out: row number, counted over all tables; the first row of its table if invalid.
        places: (N,) out, if PLACES, see `place_of`.
        scales: (N,) out, if PLACES and SCALED.
        totals: (PASSES, 2 ** BITS) the count of each value of each digit; the kernel adds to it.
        status: out: the first `clear` words become 0.
        shift, steps: see `place_of`.
        PADDING: the treatment of the value −1. "none": invalid; "skipped": the key is −1; "last": the key
            is the one after the rows of the table, which the group of tables leaves free.
        BITS, WIDE: the first WIDE digits have BITS bits, the others one bit less.
    """
    program = tl.program_id(0)
    lookup = column_of_program(lookups + PROGRAM * LOOKUPS, LOOKUPS)
    fields = lookups + lookup
    start = tl.load(fields + START * LOOKUPS)
    index = (program - tl.load(fields + PROGRAM * LOOKUPS)) * BLOCK + tl.arange(0, BLOCK)
    live = index < tl.load(fields + COUNT * LOOKUPS)
    values = tl.load(fields + VALUES * LOOKUPS).to(tl.pointer_type(tl.int64))
    values += tl.load(fields + ORIGIN * LOOKUPS)
    row = tl.load(values + index, mask=live, other=0)
    rows = tl.load(fields + ROWS_AT * LOOKUPS)
    if PADDING != "none":
        row = tl.where(row == -1, rows, row)
        wrong = (row < 0) | (row > rows)
    else:
        wrong = (row < 0) | (row >= rows)
    set_flag(flag, live & wrong, BAD_VALUES)
    padding = row == rows
    row = tl.where(wrong, 0, row) + tl.load(fields + BASE * LOOKUPS)
    if PADDING == "skipped":
        row = tl.where(padding, -1, row)
    tl.store(keys + start + index, row.to(keys.dtype.element_ty), mask=live)
    if PLACES:
        place, scale = place_of(start + index, live, lookups, shift, steps, LOOKUPS, SCALED)
        tl.store(places + start + index, place.to(places.dtype.element_ty), mask=live)
        if SCALED:
            tl.store(scales + start + index, scale, mask=live)
    if PASSES > 0:
        bins: tl.constexpr = 2**BITS
        for one in tl.static_range(PASSES):
            low = one * BITS - (one - WIDE if one > WIDE else 0)
            digit = ((row >> low) & (bins - 1 if one < WIDE else bins // 2 - 1)).to(tl.int32)
            counts = tl.histogram(digit, bins, mask=live)
            tl.atomic_add(totals + one * bins + tl.arange(0, bins), counts, mask=counts > 0, sem="relaxed")
        for done in range(program * BLOCK, clear, BLOCK * tl.num_programs(0)):
            word = done + tl.arange(0, BLOCK)
            tl.store(status + word, tl.zeros((BLOCK,), tl.int32), mask=word < clear)


@triton.jit
def end_of_run(keys, key, begin, n, PROBES: tl.constexpr):
    """Return the first position from `begin` on that has another key, or n.

    The next positions are compared first, because most runs are short. The rest is sorted, so it is divided
    into PROBES + 1 parts repeatedly.
    """
    low = begin
    high = n.to(tl.int64)
    probe = low + tl.arange(0, PROBES)
    same = tl.load(keys + probe, mask=probe < high, other=-1) == key
    found = tl.sum(same.to(tl.int32), 0)
    low += found
    if found < PROBES:
        high = low
    while low < high:
        step = (high - low + PROBES) // (PROBES + 1)
        probe = low + (tl.arange(0, PROBES) + 1) * step - 1
        same = tl.load(keys + probe, mask=probe < high, other=-1) == key
        found = tl.sum(same.to(tl.int32), 0)
        high = tl.where(found < PROBES, tl.minimum(high, low + (found + 1) * step - 1), high)
        low += found * step
    return low


@triton.jit(do_not_specialize=["n", "used"])
def find_runs(
    keys,
    starts,
    counts,
    ends,
    work,
    n,
    used,
    BLOCK: tl.constexpr,
    PROBES: tl.constexpr,
):
    """List the runs that begin in BLOCK sorted positions.

    Args:
        keys: (n,) sorted.
        starts: (n,) uint8 out: for each block the begins of its runs, relative to the block.
        counts: (blocks,) out: the number of runs of each block.
        ends: (blocks,) out: the end of the last run of each block, in this block or a later one.
        work: out: the first `used` words become 0 for the next sort.
    """
    program = tl.program_id(0)
    begin = program.to(tl.int64) * BLOCK
    position = begin + tl.arange(0, BLOCK)
    live = position < n
    key = tl.load(keys + position, mask=live, other=-1)
    before = tl.load(keys + position - 1, mask=live & (position > 0), other=-1)
    heads = live & (key != before)
    rank = tl.cumsum(heads.to(tl.int32), 0) - 1
    tl.store(starts + begin + rank, tl.arange(0, BLOCK).to(tl.uint8), mask=heads)
    tl.store(counts + program, tl.sum(heads.to(tl.int32), 0))
    after = tl.minimum(begin + BLOCK, n)
    end = end_of_run(keys, tl.load(keys + after - 1), after, n, PROBES)
    tl.store(ends + program, end.to(ends.dtype.element_ty))
    for done in range(begin, used, tl.num_programs(0).to(tl.int64) * BLOCK):
        word = done + tl.arange(0, BLOCK)
        tl.store(work + word, tl.zeros((BLOCK,), tl.int32), mask=word < used)
