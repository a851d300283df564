# mypy: ignore-errors
# ruff: noqa: N803, D417
# Triton compiles this source: names of constants are in capitals; branches on them are taken at compile time.
"""A stable radix sort: one pass for each digit of the keys, the lowest first; each pass is one launch.

A program sorts one tile after another. It counts the digits of the tile, sorts the tile by digit, adds up
the counts of the earlier tiles (Merrill and Garland's decoupled look-back), and writes its elements to their
final positions. The sort is stable, so the result is deterministic.

In the look-back a tile publishes one word for each digit: two bits are the status, the others the count. No
other memory must be visible with the word, so relaxed atomics suffice. Tiles are numbered by a ticket, so a
tile only waits for tiles of programs that already run, and the first tile waits for none: no deadlock.
"""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.sort import place_of

#: The status of a published word (0 if missing): the count of this tile only, or of all tiles up to it.
ALONE = tl.constexpr(1)
WHOLE = tl.constexpr(2)
#: Elements that are counted in one word, in fields of 4 bits; at most 15.
GROUP = tl.constexpr(8)
#: Registers of a thread, enough to avoid spills; 16 warps fit on a multiprocessor.
REGISTERS = 128


@triton.jit
def ranks(digit, WORDS: tl.constexpr):
    """Return the index of each element of a tile in a stable sort by this digit.

    All 16 counts of eight elements fit into one int64, in fields of 4 bits. The counts of a whole tile need
    16 bits each, so there are four int64, summed over groups of eight instead of elements.

    Args:
        digit: (TILE / 8, 8) int32 of 4 bits, below 4 · WORDS; TILE is at most 2¹⁵.
    """
    nibble = (digit << 2).to(tl.int64)
    ones = tl.full(digit.shape, 1, tl.int64) << nibble
    here = ((tl.cumsum(ones, 1) >> nibble) & 15).to(tl.int32)
    group = tl.sum(ones, 1)
    word = digit >> 2
    base = tl.zeros(digit.shape, tl.int64)
    before = tl.sum(group, 0) * 0
    for index in tl.static_range(WORDS):
        four = group >> (16 * index)
        fields = (four & 0xF) | ((four & 0xF0) << 12) | ((four & 0xF00) << 24) | ((four & 0xF000) << 36)
        total = tl.sum(fields, 0)
        # the prefix sum of four fields: x · (1 + 2¹⁶ + 2³² + 2⁴⁸)
        through = total + (total << 16)
        through += through << 32
        below = before + (before << 16)
        below += (below << 32) + through - total
        base = tl.where(word == index, (tl.cumsum(fields, 0) - fields + below)[:, None], base)
        before += (through >> 48) & 0xFFFF
    field = ((digit & 3) << 4).to(tl.int64)
    return ((base >> field) & 0xFFFF).to(tl.int32) + here - 1


@triton.jit
def take(word, going, open_, total, moved):
    """Add the count in the word of one earlier tile; return whether to go on, and the new sums."""
    known = going & ((word & 3) != 0)
    total += tl.where(known, word >> 2, 0)
    moved += known.to(tl.int32)
    whole = known & ((word & 3) == WHOLE)
    return known & (word & 3 == ALONE), open_ & (whole == 0), total, moved


@triton.jit
def look_back(status, tile, BINS: tl.constexpr):
    """Return the count of each digit in the tiles before this one; up to four tiles are read at a time.

    With fewer bins than threads several threads read the same word, and may read different values.
    Reductions and stores use the value of one of these threads, always the same.
    """
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    at = total + (tile - 1)
    open_ = at >= 0
    while tl.max(open_.to(tl.int32), 0) != 0:
        word = status + at.to(tl.int64) * BINS + bins
        moved = tl.zeros((BINS,), tl.int32)
        going = open_
        a = tl.load(word, mask=open_, other=0, volatile=True)
        if BINS <= 256:  # more bins would spill registers
            b = tl.load(word - BINS, mask=open_ & (at >= 1), other=0, volatile=True)
            c = tl.load(word - 2 * BINS, mask=open_ & (at >= 2), other=0, volatile=True)
            d = tl.load(word - 3 * BINS, mask=open_ & (at >= 3), other=0, volatile=True)
        going, open_, total, moved = take(a, going, open_, total, moved)
        if BINS <= 256:
            going, open_, total, moved = take(b, going, open_, total, moved)
            going, open_, total, moved = take(c, going, open_, total, moved)
            going, open_, total, moved = take(d, going, open_, total, moved)
        at -= moved
    return total


@triton.jit
def put_in_order(digit, element, scratch, BITS: tl.constexpr):
    """Return (digit << 16 | element) of the elements of a tile, in a stable sort by digit.

    The tile is sorted by 4 bits of the digit after the other; elements change their places by way of memory,
    which only this program uses, so they come back from a cache.
    """
    packed = (digit << 16) | element
    for low in tl.static_range(0, BITS, 4):
        to = ranks((packed >> (16 + low)) & 15, 4 if BITS - low > 3 else (2 if BITS - low == 3 else 1))
        tl.store(scratch + to, packed)
        tl.debug_barrier()
        packed = tl.load(scratch + element)
        tl.debug_barrier()
    return packed


@triton.jit(do_not_specialize=["n", "tiles", "low", "shift", "steps"])
def radix_pass(
    keys,
    order,
    sorted_keys,
    sorted_order,
    scales,
    lookups,
    totals,
    ticket,
    status,
    scratch,
    n,
    tiles,
    low,
    shift,
    steps,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    SCALED: tl.constexpr,
    LOOKUPS: tl.constexpr,
    BITS: tl.constexpr,
    LOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sort by one digit.

    Between two passes the LOW lowest bits of a key are in the highest bits of its word of the order. So keys
    of 16 + LOW bits need 16 bits, and passes move less memory.

    Args:
        keys: (n,) sorted by all lower digits; int32 if FIRST.
        order: (n,) int32, the index of each value, below 2 ** (32 - LOW); not read if FIRST: 0, 1, ….
        sorted_keys: (n,) out; int32 if LAST.
        sorted_order: (n,) out; if LAST the places of the values, see `sort.place_of`.
        scales: (n,) out, if LAST and SCALED.
        lookups, shift, steps: see `sort.place_of`.
        totals: (2 ** BITS,) the count of each digit.
        ticket: (1,) the next tile.
        status: (tiles, 2 ** BITS) int32, zero at the start.
        scratch: (programs, TILE + 2 ** BITS) int32.
        n: number of keys, below 2²⁹.
        low: the lowest bit of the digit in the stored keys.
    """
    bins_: tl.constexpr = 2**BITS
    bins = tl.arange(0, bins_)
    element = tl.arange(0, TILE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    scratch += tl.program_id(0).to(tl.int64) * (TILE + bins_)
    total = tl.load(totals + bins)
    begins = tl.cumsum(total, 0) - total
    tile = tl.atomic_add(ticket, 1, sem="relaxed")
    while tile < tiles:
        begin = tile.to(tl.int64) * TILE
        count = tl.minimum(n - begin, TILE).to(tl.int32)
        key = tl.load(keys + begin + element, mask=element < count, other=0).to(tl.int32)
        digit = (key >> low) & (bins_ - 1)
        digit = tl.where(element < count, digit, bins_ - 1)  # padding sorts to the end
        counts = tl.histogram(tl.reshape(digit, (TILE,), can_reorder=True), bins_)
        counts = tl.where(bins == bins_ - 1, counts - (TILE - count), counts)
        mine = status + tile.to(tl.int64) * bins_ + bins
        tl.atomic_xchg(mine, (counts << 2) | tl.where(tile == 0, WHOLE, ALONE), sem="relaxed")
        packed = put_in_order(digit, element, scratch, BITS)
        before = tl.zeros((bins_,), tl.int32)
        if tile > 0:
            before = look_back(status, tile, bins_)
            tl.atomic_xchg(mine, ((before + counts) << 2) | WHOLE, sem="relaxed")
        tl.store(scratch + TILE + bins, begins + before - (tl.cumsum(counts, 0) - counts))
        tl.debug_barrier()
        to = tl.load(scratch + TILE + (packed >> 16)) + element
        live = element < count
        source = begin + (packed & 0xFFFF)
        key = tl.load(keys + source, mask=live, other=0).to(tl.int32)
        which = source.to(tl.int32)
        if not FIRST:
            which = tl.load(order + source, mask=live, other=0)
        if LOW > 0:
            if FIRST:
                which |= (key & (2**LOW - 1)) << (32 - LOW)
                key = key >> LOW
            if LAST:
                key = (key << LOW) | ((which >> (32 - LOW)) & (2**LOW - 1))
                which = which & (2 ** (32 - LOW) - 1)
        tl.store(sorted_keys + to, key.to(sorted_keys.dtype.element_ty), mask=live)
        if LAST:
            place, scale = place_of(which, live, lookups, shift, steps, LOOKUPS, SCALED)
            tl.store(sorted_order + to, place.to(sorted_order.dtype.element_ty), mask=live)
            if SCALED:
                tl.store(scales + to, scale, mask=live)
        else:
            tl.store(sorted_order + to, which, mask=live)
        tl.debug_barrier()
        tile = tl.atomic_add(ticket, 1, sem="relaxed")
