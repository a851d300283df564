# mypy: ignore-errors
# ruff: noqa: N803, D417
# Kernels are compiled from their source: annotations of tensors mean nothing there, constants are capitals,
# and a branch on a constant is taken when it is compiled.
"""From lookups to runs: keys that number the rows of all tables, and where the runs of equal keys begin.

Neither needs the gradients, so both are done in the forward. Between them the keys are sorted, in as few bits
as they need.
"""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.layout import LOOKUP_WORDS

PROGRAM = tl.constexpr(LOOKUP_WORDS.index("program"))
START = tl.constexpr(LOOKUP_WORDS.index("start"))
COUNT = tl.constexpr(LOOKUP_WORDS.index("count"))
BAGS = tl.constexpr(LOOKUP_WORDS.index("bags"))
VALUES = tl.constexpr(LOOKUP_WORDS.index("values"))
OFFSETS = tl.constexpr(LOOKUP_WORDS.index("offsets"))
WEIGHTS = tl.constexpr(LOOKUP_WORDS.index("weights"))
BASE = tl.constexpr(LOOKUP_WORDS.index("base"))
MEAN = tl.constexpr(LOOKUP_WORDS.index("mean"))
#: Of a thread: enough for 32 warps on a multiprocessor, which hide the latency of single loads.
REGISTERS = 64


@triton.jit
def bag_of(position, offsets, bags, steps):
    """Return the last bag that begins at a position or before it, by bisection in so many steps."""
    low = tl.zeros_like(position)
    high = low + bags
    for _ in range(steps):
        middle = (low + high) // 2
        right = tl.load(offsets + middle) <= position
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit(do_not_specialize=["shift", "steps"])
def write_keys(
    lookups,
    keys,
    places,
    scales,
    shift,
    steps,
    LOOKUPS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write key, place and scale of BLOCK values of one lookup.

    Args:
        lookups: words of `LOOKUP_WORDS`.
        keys: (N,) out: row number, counted over all tables.
        places: (N,) out: lookup in the bits from `shift` on, below it the bag, or value without pooling.
        scales: (N,) out, if SCALED: by what the gradient of the bag is multiplied.
        shift: bits of the bags.
        steps: of a bisection of the bags.
    """
    program = tl.program_id(0)
    begins = tl.load(lookups + PROGRAM * LOOKUPS + tl.arange(0, LOOKUPS))
    lookup = tl.sum((program >= begins).to(tl.int32), 0) - 1
    words = lookups + lookup
    start = tl.load(words + START * LOOKUPS)
    index = (program - tl.load(words + PROGRAM * LOOKUPS)) * BLOCK + tl.arange(0, BLOCK)
    live = index < tl.load(words + COUNT * LOOKUPS)
    values = tl.load(words + VALUES * LOOKUPS).to(tl.pointer_type(tl.int64))
    row = tl.load(values + index, mask=live, other=0) + tl.load(words + BASE * LOOKUPS)
    tl.store(keys + start + index, row.to(keys.dtype.element_ty), mask=live)
    bag = index
    scale = tl.full((BLOCK,), 1.0, tl.float32)
    address = tl.load(words + OFFSETS * LOOKUPS)
    if address != 0:
        offsets = address.to(tl.pointer_type(tl.int64))
        bag = bag_of(index, offsets, tl.load(words + BAGS * LOOKUPS), steps)
        if SCALED:
            length = tl.load(offsets + bag + 1, mask=live, other=1) - tl.load(
                offsets + bag, mask=live, other=0
            )
            mean = tl.load(words + MEAN * LOOKUPS)
            scale = tl.div_rn(scale, tl.where(mean != 0, tl.maximum(length, 1), 1).to(tl.float32))
    place = bag + (lookup.to(tl.int64) << shift)
    tl.store(places + start + index, place.to(places.dtype.element_ty), mask=live)
    if SCALED:
        address = tl.load(words + WEIGHTS * LOOKUPS)
        if address != 0:
            weights = address.to(tl.pointer_type(tl.float32))
            scale = scale * tl.load(weights + index, mask=live, other=0.0)
        tl.store(scales + start + index, scale, mask=live)


@triton.jit
def end_of_run(keys, key, begin, n, PROBES: tl.constexpr):
    """Return the first position from `begin` on that has another key, or n.

    The next positions are looked at first, for most runs are short; then the rest, sorted as it is, is cut
    into PROBES + 1 parts again and again.
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


@triton.jit
def begin_of_run(keys, key, low, high, PROBES: tl.constexpr):
    """Return the first position from `low` on that has the key; `high` has it."""
    while low < high:
        step = (high - low + PROBES) // (PROBES + 1)
        probe = low + (tl.arange(0, PROBES) + 1) * step - 1
        other = tl.load(keys + probe, mask=probe < high, other=0) != key
        found = tl.sum((other & (probe < high)).to(tl.int32), 0)
        high = tl.where(found < PROBES, tl.minimum(high, low + (found + 1) * step - 1), high)
        low += found * step
    return low


@triton.jit(do_not_specialize=["n"])
def find_runs(
    keys,
    order,
    places,
    scales,
    sorted_places,
    sorted_scales,
    starts,
    counts,
    ends,
    n,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    PROBES: tl.constexpr,
):
    """List the runs that begin in BLOCK sorted positions, and bring places and scales into their order.

    Args:
        keys: (n,) sorted.
        order: (n,) which value came to each position.
        places: (n,) before the sort.
        scales: (n,) before the sort, if SCALED.
        sorted_places: (n,) out.
        sorted_scales: (n,) out, if SCALED.
        starts: (n,) out: block by block, where its runs begin.
        counts: (blocks,) out: how many they are.
        ends: (blocks,) out: where the last of them ends, in this block or a later one.
    """
    program = tl.program_id(0)
    begin = program.to(tl.int64) * BLOCK
    position = begin + tl.arange(0, BLOCK)
    live = position < n
    source = tl.load(order + position, mask=live, other=0)
    tl.store(sorted_places + position, tl.load(places + source, mask=live, other=0), mask=live)
    if SCALED:
        tl.store(sorted_scales + position, tl.load(scales + source, mask=live, other=0.0), mask=live)
    key = tl.load(keys + position, mask=live, other=-1)
    before = tl.load(keys + position - 1, mask=live & (position > 0), other=-1)
    heads = live & (key != before)
    rank = tl.cumsum(heads.to(tl.int32), 0) - 1
    tl.store(starts + begin + rank, position.to(starts.dtype.element_ty), mask=heads)
    tl.store(counts + program, tl.sum(heads.to(tl.int32), 0))
    after = tl.minimum(begin + BLOCK, n)
    end = end_of_run(keys, tl.load(keys + after - 1), after, n, PROBES)
    tl.store(ends + program, end.to(ends.dtype.element_ty))
