# mypy: ignore-errors
# ruff: noqa: N803, D417
# Triton compiles this source: names of constants are in capitals; branches on them are taken at compile time.
"""Device functions that sum gradients: the runs of several rows side by side.

After the sort by row, the gradients of a row are a run of positions. Each position has a place: the high bits
are the lookup, the low bits the bag, or the value without pooling. It may have a scale: weight over length.
"""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.arithmetic import add_exactly, aligned, total_of

#: The places in FORM: number of lookups; dtype, alignment and unit of gradients; whether they have scales.
LOOKUPS, DTYPE, ALIGN, UNIT, SCALED = (tl.constexpr(place) for place in range(5))


@triton.jit
def gradients_at(position, live, source, FORM: tl.constexpr):
    """Return the addresses of the gradients at some positions, and their scales, or 1."""
    places, scales, grads, shift = source
    size: tl.constexpr = FORM[DTYPE].primitive_bitwidth // 8
    place = tl.load(places + position, mask=live, other=0)
    lookup = place >> shift
    bag = (place - (lookup << shift)).to(tl.int64)
    stride = tl.load(grads + FORM[LOOKUPS] + lookup, mask=live, other=0)
    address = tl.load(grads + lookup, mask=live, other=0) + bag * stride * (FORM[UNIT] * size)
    return address, tl.load(scales + position, mask=live, other=0.0) if FORM[SCALED] else 1.0


@triton.jit
def read_gradients(address, scale, live, inside, FORM: tl.constexpr, WIDTH: tl.constexpr):
    """Return the gradients at some addresses, (ROWS, WIDTH), one row of each."""
    begin = aligned(address, FORM[DTYPE], FORM[ALIGN], FORM[UNIT])
    mask = live[:, None] & inside
    values = tl.load(begin[:, None] + tl.arange(0, WIDTH)[None, :], mask=mask, other=0.0).to(tl.float32)
    return values * scale[:, None] if FORM[SCALED] else values


@triton.jit
def sum_positions(
    high,
    low,
    first,
    length,
    gap,
    chunk,
    inside,
    source,
    FORM: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Add in each row `length` positions from `first` on; UNROLL loads of a row are in flight.

    The lower `chunk` bits of `gap` are the number of positions after which the rest of `gap` is left out: one
    number, because registers are few. The numbers are int32.

    Returns:
        The sums, (ROWS, WIDTH), and their rounding errors.
    """
    longest = tl.max(length, 0)
    for done in range(0, longest, UNROLL):
        for one in tl.static_range(UNROLL):
            at = done + one
            head = gap & ((1 << chunk) - 1)
            active = at < length
            position = first + (at + tl.where(at < head, 0, gap - head))
            address, scale = gradients_at(position, active, source, FORM)
            more = read_gradients(address, scale, active, inside, FORM, WIDTH)
            high, low = add_exactly(high, low, more)
    return high, low


@triton.jit
def add_chunks(high, low, first, number, inside, partials, chunks, FOLD: tl.constexpr, WIDTH: tl.constexpr):
    """Add in each row the sums of `number` chunks from `first` on, see `chunks`.

    Folds of 2 ** FOLD chunks have sums of their own, unless FOLD is 0. `chunks` is the number of all chunks;
    `high` and `low` are the sums so far and their rounding errors.
    """
    head = number
    count = number
    if FOLD > 0:
        fold = (first + (2**FOLD - 1)) >> FOLD
        folds = tl.maximum(((first + number) >> FOLD) - fold, 0).to(tl.int32)
        head = tl.where(folds > 0, ((fold << FOLD) - first).to(tl.int32), number)
        count -= folds * (2**FOLD - 1)
    most = tl.max(count, 0)
    for one in range(most):
        row = first + one
        if FOLD > 0:
            beyond = one - head
            after = row + tl.where(beyond >= 0, folds * (2**FOLD - 1), 0)
            row = tl.where((beyond >= 0) & (beyond < folds), chunks + fold + beyond, after)
        at = partials + ((row * (2 * WIDTH))[:, None] + tl.arange(0, WIDTH)[None, :])
        live = (one < count)[:, None] & inside
        high, low = add_exactly(high, low, tl.load(at, mask=live, other=0.0))
        low += tl.load(at + WIDTH, mask=live, other=0.0)
    return high, low


@triton.jit
def runs_in_block(begin, runs, last, starts, chunk, BLOCK: tl.constexpr):
    """Return where the runs of a block begin in it, and how many of its positions each sums one by one.

    A run that begins with a chunk, which is as long as the block or longer, sums none of them.
    """
    run = tl.arange(0, BLOCK)
    start = tl.load(starts + begin + run, mask=run < runs, other=0).to(tl.int32)
    after = tl.gather(start, tl.minimum(run + 1, BLOCK - 1), 0)
    end = tl.where(run + 1 < runs, after, tl.minimum(last - begin, BLOCK).to(tl.int32))
    whole = (begin & ((1 << chunk) - 1) == 0) & (last - begin >= 1 << chunk) & (runs == 1)
    return start, tl.where((run < runs) & ~(whole & (start == 0)), end - start, 0)


@triton.jit
def sum_in_block(index, inside, block, FORM: tl.constexpr, WIDTH: tl.constexpr):
    """Sum the gradients of some runs of a block, as far as they lie in the block; see `sum_runs`."""
    start, length, address, scale = block
    at = tl.gather(start, index, 0)
    number = tl.gather(length, index, 0)
    factor = tl.gather(scale, at, 0) if FORM[SCALED] else scale
    high = read_gradients(tl.gather(address, at, 0), factor, number > 0, inside, FORM, WIDTH)
    low = tl.zeros_like(high)
    for one in range(1, tl.max(number, 0)):
        here = tl.minimum(at + one, address.shape[0] - 1)
        if FORM[SCALED]:
            factor = tl.gather(scale, here, 0)
        more = read_gradients(tl.gather(address, here, 0), factor, one < number, inside, FORM, WIDTH)
        high, low = add_exactly(high, low, more)
    return high, low


@triton.jit
def sum_runs(
    index,
    inside,
    block,
    bounds,
    sums,
    source,
    FORM: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sum the gradients of some runs of a block, (ROWS, WIDTH).

    Args:
        index: (ROWS,) which runs.
        inside: which columns they have.
        block: for each run its begin and its length, see `runs_in_block`; for each position address and scale
            of the gradient, see `gradients_at`.
        bounds: the begin of the block, the number of its runs, the end of the last run, and `starts`.
        sums: `partials`, `chunks` and `chunk`, see `chunks`.
        source: `places`, `scales`, `grads` and `shift`.
        FORM: by `LOOKUPS`, `DTYPE`, `ALIGN`, `UNIT` and `SCALED`.
    """
    begin, runs, last, starts = bounds
    high, low = sum_in_block(index, inside, block, FORM, WIDTH)
    if (last >= begin + BLOCK) & (tl.max(index, 0) >= runs - 1):
        # the rest of the last run: the chunks in it, and the positions around them
        partials, chunks, chunk = sums
        position = begin + tl.load(starts + begin + runs - 1).to(tl.int64)
        first = (position + (1 << chunk) - 1) >> chunk
        number = tl.maximum((last >> chunk) - first, 0)
        # what `sum_in_block` has left out, or what is behind the block
        rest = tl.where((number > 0) & (first << chunk == position), position, begin + BLOCK)
        skip = number << chunk
        gap = (skip + tl.where(number > 0, (first << chunk) - rest, 0)).to(tl.int32)
        mine = index == runs - 1
        many = tl.where(mine, number.to(tl.int32), 0)
        high, low = add_chunks(high, low, first + index * 0, many, inside, partials, chunks, FOLD, WIDTH)
        length = tl.where(mine, (last - rest - skip).to(tl.int32), 0)
        high, low = sum_positions(
            high, low, rest + index * 0, length, gap + index * 0, chunk, inside, source, FORM, WIDTH, 1
        )
    return total_of(high, low)
