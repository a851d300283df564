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
    first,
    length,
    inside,
    places,
    scales,
    grads,
    shift,
    EVERY: tl.constexpr,
    LOOKUPS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sum in each row the `length` positions first, first + EVERY, …; UNROLL loads of a row are in flight.

    Returns:
        The sums, (ROWS, WIDTH), and their rounding errors.
    """
    high = tl.zeros((ROWS, WIDTH), tl.float32)
    low = tl.zeros((ROWS, WIDTH), tl.float32)
    longest = tl.max(length, 0)
    for done in range(0, longest, UNROLL):
        for one in tl.static_range(UNROLL):
            at = done + one
            more = gradients(
                first + at * EVERY,
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
def sum_runs(
    position,
    length,
    inside,
    places,
    scales,
    grads,
    totals,
    shift,
    chunk,
    LOOKUPS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sum ROWS runs, (ROWS, WIDTH); longer runs than `chunk` are summed already, see `chunks`."""
    long = length > chunk
    high, low = sum_positions(
        position,
        tl.where(long, 0, length).to(tl.int32),
        inside,
        places,
        scales,
        grads,
        shift,
        1,
        LOOKUPS,
        DTYPE,
        ALIGN,
        UNIT,
        SCALED,
        ROWS,
        WIDTH,
        UNROLL,
    )
    total = totals + ((position // chunk + 1) * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    return total_of(high, low) + tl.load(total, mask=long[:, None] & inside, other=0.0)
