# mypy: ignore-errors
# ruff: noqa: N803, D417
# Triton compiles this source: names of constants are in capitals; branches on them are taken at compile time.
"""A stable radix sort: one pass for each digit of the keys, the lowest first; each pass is one launch.

A program sorts one tile after another. It sorts the tile by digit, counts the digits, adds up the counts of
the earlier tiles (Merrill and Garland's decoupled look-back), and writes its elements to their final
positions. The sort is stable, so the result is deterministic.

In the look-back a tile publishes one word for each digit: three bits are the status, the others the count.
The statuses of a pass are greater than those of the pass before, whose words are still in the memory. No
other memory must be visible with the word, so relaxed atomics of the scope of the GPU suffice; volatile loads
read them from the L2 cache. Tiles are numbered by a ticket, so a tile only waits for tiles of programs that
already run, and the first tile waits for none: no deadlock, also if the grid has more programs than fit on
the GPU at a time. The words and the counts are cleared by earlier launches on the same stream. What threads
of a program exchange is in memory of this program, ordered by barriers.

There are fewer than 2²⁸ keys, so positions and counts fit into int32; offsets into `status` and `scratch` are
int64.
"""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.sort import place_of

#: Registers of a thread, for four programs of 8 warps on a multiprocessor; of the first pass, which computes
#: places, for three; of digits of more than 8 bits, for two.
REGISTERS, FIRST_REGISTERS, WIDE_REGISTERS = 64, 80, 128


@triton.jit
def ranks(digit, element):
    """Return the index of each element of a tile in a stable sort by a digit of two bits.

    The counts of the digits 0, 1 and 2 are in fields of one word, so one prefix sum counts all. The highest
    field has 10 bits: a count of 1024 in it becomes 0, but then all digits are 2, and the field is not read.

    Args:
        digit: (TILE,) int32; TILE is at most 1024.
        element: (TILE,) 0, 1, ….
    """
    field = (digit * 11).to(tl.uint32)
    ones = tl.where(digit == 3, 0, 1 << field).to(tl.uint32)
    together = tl.sum(ones, 0)
    before = tl.cumsum(ones, 0) - ones + (tl.cumsum(together, 0) - together)[None, :]
    total = tl.sum(together, 0)
    # every field starts after the elements of the lower digits
    low = ((before + (total << 11) + (total << 22)) >> field) & 2047
    rest = total - before
    high = element + ((rest & 2047) + ((rest >> 11) & 2047) + (rest >> 22)).to(tl.int32)
    return tl.where(digit == 3, high, low.to(tl.int32))


@triton.jit
def look_back(status, tile, alone, bins, real, BINS: tl.constexpr):
    """Return the count of each digit in the tiles before this one; several tiles are read at a time.

    A word with the status `alone` has the count of its tile, and one with the next status the count of all
    tiles up to it.

    Each word is read by one thread, because there are at least as many bins as threads. Otherwise several
    threads would read the same word, and could get different values.
    """
    ahead: tl.constexpr = 8 if BINS <= 256 else 2048 // BINS  # more would spill registers
    total = tl.zeros(bins.shape, tl.int32)
    at = total + (tile - 1)
    open_ = real & (at >= 0)
    while tl.max(open_.to(tl.int32), 0) != 0:
        word = status + at.to(tl.int64) * BINS + bins
        words = ()
        for back in tl.static_range(ahead):
            words += (tl.load(word - back * BINS, mask=open_ & (at >= back), other=0, volatile=True),)
        going = open_
        moved = tl.zeros(bins.shape, tl.int32)
        for back in tl.static_range(ahead):
            known = tl.where(going, words[back] & 7, 0)
            total += tl.where(known >= alone, words[back] >> 3, 0)
            open_ = open_ & (known <= alone)
            going = known == alone
            moved += going.to(tl.int32)
        at -= moved
    return total


@triton.jit
def put_in_order(digit, element, scratch, BITS: tl.constexpr):
    """Write (digit << 16 | element) of the elements of a tile to `scratch`, in a stable sort by digit.

    The tile is sorted by two bits of the digit at a time. Elements change their places by way of memory that
    only this program uses, so they come back from a cache.
    """
    packed = (digit << 16) | element
    for low in tl.static_range(0, BITS, 2):
        if low > 0:
            packed = tl.load(scratch + element)
            tl.debug_barrier()
        to = ranks((packed >> (16 + low)) & (3 if low + 1 < BITS else 1), element)
        tl.store(scratch + to, packed)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["n", "tiles", "low", "alone", "shift", "steps"])
def radix_pass(
    keys,
    places,
    sorted_keys,
    sorted_places,
    scales,
    sorted_scales,
    lookups,
    totals,
    ticket,
    status,
    scratch,
    n,
    tiles,
    low,
    alone,
    shift,
    steps,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    SCALED: tl.constexpr,
    LOOKUPS: tl.constexpr,
    BITS: tl.constexpr,
    LOW: tl.constexpr,
    TILE: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Sort by one digit.

    Between two passes the LOW lowest bits of a key are in the highest bits of its place. So keys
    of 16 + LOW bits need 16 bits, and passes move less memory.

    Args:
        keys: (n,) sorted by all lower digits; int32 if FIRST.
        places: (n,) of the values, see `sort.place_of`, below 2 ** (32 - LOW) if LOW > 0; not read if FIRST,
            which computes them, because neighbours are mostly in the same bag.
        sorted_keys, sorted_places: (n,) out; keys are int32 if LAST.
        scales: (n,) if SCALED; not read if FIRST.
        sorted_scales: (n,) out, if SCALED.
        lookups, shift, steps: see `sort.place_of`.
        totals: (2 ** BITS,) the count of each digit.
        ticket: (1,) the next tile.
        status: (tiles, 2 ** BITS) int32, zero or words of earlier passes at the start.
        scratch: (programs, TILE + 2 · 2 ** BITS) int32: the sorted tile, and the first element and the end of
            each digit in it.
        n: number of keys, below 2²⁸.
        low: the lowest bit of the digit in the stored keys.
        alone: the status of a count of one tile, see `look_back`; each pass has one that is greater by 2.
        TILE: at most 1024.
        THREADS: of a program.
    """
    bins_: tl.constexpr = 2**BITS
    bins = tl.arange(0, bins_ if bins_ > THREADS else THREADS)
    real = bins < bins_
    each: tl.constexpr = TILE // THREADS
    # a thread has consecutive elements, so that most of the prefix sums stay in the thread
    element = tl.arange(0, each)[:, None] + tl.arange(0, THREADS)[None, :] * each
    scratch += tl.program_id(0).to(tl.int64) * (TILE + 2 * bins_)
    firsts, ends = scratch + TILE, scratch + TILE + bins_
    total = tl.load(totals + bins, mask=real, other=0)
    begins = tl.cumsum(total, 0) - total
    tile = tl.atomic_add(ticket, 1, sem="relaxed")
    while tile < tiles:
        begin = tile.to(tl.int64) * TILE
        count = tl.minimum(n - begin, TILE).to(tl.int32)
        live = element < count
        tl.store(firsts + bins, bins * 0, mask=real)
        tl.store(ends + bins, bins * 0, mask=real)
        key = tl.load(keys + begin + element, mask=live, other=0).to(tl.int32)
        # padding sorts to the end
        put_in_order(tl.where(live, (key >> low) & (bins_ - 1), bins_ - 1), element, scratch, BITS)
        packed = tl.load(scratch + element)
        digit = packed >> 16
        before = tl.load(scratch + element - 1, mask=element > 0, other=-1) >> 16
        after = tl.load(scratch + element + 1, mask=element + 1 < count, other=-1) >> 16
        tl.store(firsts + digit, element, mask=live & (digit != before))
        tl.store(ends + digit, element + 1, mask=live & (digit != after))
        tl.debug_barrier()
        first = tl.load(firsts + bins, mask=real, other=0)
        counts = tl.load(ends + bins, mask=real, other=0) - first
        mine = status + tile.to(tl.int64) * bins_ + bins
        tl.atomic_xchg(mine, (counts << 3) | (alone + (tile == 0).to(tl.int32)), mask=real, sem="relaxed")
        earlier = look_back(status, tile, alone, bins, real, bins_)
        if tile > 0:
            tl.atomic_xchg(mine, ((earlier + counts) << 3) | (alone + 1), mask=real, sem="relaxed")
        tl.store(firsts + bins, begins + earlier - first, mask=real)
        tl.debug_barrier()
        to = tl.load(firsts + digit) + element
        source = begin + (packed & 0xFFFF)
        key = tl.load(keys + source, mask=live, other=0).to(tl.int32)
        if FIRST:
            place, scale = place_of(source, live, lookups, shift, steps, LOOKUPS, SCALED)
            place = place.to(sorted_places.dtype.element_ty)
        else:
            place = tl.load(places + source, mask=live, other=0)
            if SCALED:
                scale = tl.load(scales + source, mask=live, other=0.0)
        if LOW > 0:
            if FIRST:
                place |= (key & (2**LOW - 1)) << (32 - LOW)
                key = key >> LOW
            if LAST:
                key = (key << LOW) | ((place >> (32 - LOW)) & (2**LOW - 1))
                place = place & (2 ** (32 - LOW) - 1)
        tl.store(sorted_keys + to, key.to(sorted_keys.dtype.element_ty), mask=live)
        tl.store(sorted_places + to, place, mask=live)
        if SCALED:
            tl.store(sorted_scales + to, scale, mask=live)
        tl.debug_barrier()
        tile = tl.atomic_add(ticket, 1, sem="relaxed")
