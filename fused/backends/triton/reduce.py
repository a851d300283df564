# mypy: ignore-errors
# ruff: noqa: N803
# Triton compiles this source: names of constants are in capitals; branches on them are taken at compile time.
"""Device functions that sum gradients: the runs of several rows side by side.

After the sort by row, the gradients of a row are a run of positions. Each position has a place: the high bits
are the lookup, the low bits the bag, or the value without pooling. It may have a scale: weight over length.
"""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.arithmetic import add_exactly, pointer, total_of


@triton.jit
def gradients(
    position,
    live,
    inside,
    places,
    scales,
    grads,
    shift,
    LOOKUPS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Load the gradients at some positions, (ROWS, WIDTH), one row of each."""
    place = tl.load(places + position, mask=live, other=0)
    lookup = place >> shift
    bag = (place - (lookup << shift)).to(tl.int64)
    begin = pointer(grads + lookup, live, DTYPE, ALIGN)
    stride = tl.load(grads + LOOKUPS + lookup, mask=live, other=0) * UNIT
    columns = tl.arange(0, WIDTH)
    values = tl.load(
        begin[:, None] + ((bag * stride)[:, None] + columns[None, :]), mask=live[:, None] & inside, other=0.0
    ).to(tl.float32)
    if SCALED:
        values = values * tl.load(scales + position, mask=live, other=0.0)[:, None]
    return values


@triton.jit
def sum_positions(
    high,
    low,
    first,
    length,
    gap,
    chunk,
    inside,
    places,
    scales,
    grads,
    shift,
    LOOKUPS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
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
            more = gradients(
                first + (at + tl.where(at < head, 0, gap - head)),
                at < length,
                inside,
                places,
                scales,
                grads,
                shift,
                LOOKUPS,
                DTYPE,
                ALIGN,
                UNIT,
                SCALED,
                WIDTH,
            )
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
def sum_runs(
    position,
    length,
    inside,
    places,
    scales,
    grads,
    partials,
    shift,
    chunks,
    chunk,
    LOOKUPS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    FOLD: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sum ROWS runs, (ROWS, WIDTH); the chunks that lie in a run are summed already, see `chunks`.

    They are added first, so that few numbers stay in registers while the rest is summed.
    """
    first = (position + (1 << chunk) - 1) >> chunk
    number = tl.maximum(((position + length) >> chunk) - first, 0).to(tl.int32)
    zeros = tl.zeros((ROWS, WIDTH), tl.float32)
    high, low = add_chunks(zeros, zeros, first, number, inside, partials, chunks, FOLD, WIDTH)
    skip = number << chunk
    high, low = sum_positions(
        high,
        low,
        position,
        length.to(tl.int32) - skip,
        skip + ((first << chunk) - position).to(tl.int32),
        chunk,
        inside,
        places,
        scales,
        grads,
        shift,
        LOOKUPS,
        DTYPE,
        ALIGN,
        UNIT,
        SCALED,
        WIDTH,
        1,  # most runs are short
    )
    return total_of(high, low)
