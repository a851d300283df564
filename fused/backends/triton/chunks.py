# mypy: ignore-errors
# ruff: noqa: N803
# Triton compiles this source: names of constants are in capitals; branches on them are taken at compile time.
"""Kernels that sum the gradients of long runs, each by many programs.

A run of more than `chunk` positions is long. It is summed before the update, in two stages. `sum_chunks`
sums each chunk [k · chunk, (k + 1) · chunk) that lies entirely in the run, in one program each. `join_chunks`
adds these sums and the two ends of the run, and writes the total at the index of the first multiple of
`chunk` after the begin of the run. Every multiple lies in one run only, so no two totals share an index, and
the result does not depend on the order of programs.
"""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.arithmetic import column_of, in_float64
from keyedopt.fused.backends.triton.error_flag import no_error
from keyedopt.fused.backends.triton.reduce import sum_positions
from keyedopt.fused.backends.triton.sort import begin_of_run, end_of_run


@triton.jit
def sum_span(
    begin,
    end,
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
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sum the positions from begin to end with all rows of the program; (WIDTH,), in float64."""
    first = begin + tl.arange(0, ROWS)
    length = (tl.maximum(end - first + ROWS - 1, 0) // ROWS).to(tl.int32)
    high, low = sum_positions(
        first,
        length,
        inside,
        places,
        scales,
        grads,
        shift,
        ROWS,
        LOOKUPS,
        DTYPE,
        ALIGN,
        UNIT,
        SCALED,
        ROWS,
        WIDTH,
        UNROLL,
    )
    return tl.sum(in_float64(high, low), 0)


@triton.jit
def sum_partials(begin, end, inside, partials, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Sum the sums of the chunks from begin to end; (WIDTH,), in float64."""
    sums = tl.zeros((ROWS, WIDTH), tl.float64)
    columns = tl.arange(0, WIDTH)
    for chunk in range(begin, end, ROWS):
        row = chunk + tl.arange(0, ROWS)
        address = partials + (row * WIDTH)[:, None] + columns[None, :]
        sums += tl.load(address, mask=(row < end)[:, None] & inside, other=0.0)
    return tl.sum(sums, 0)


@triton.jit(do_not_specialize=["shift", "chunk"])
def sum_chunks(
    flag,
    keys,
    places,
    scales,
    tables,
    grads,
    partials,
    shift,
    chunk,
    TABLES: tl.constexpr,
    LOOKUPS: tl.constexpr,
    GRAD: tl.constexpr,
    GRAD_ALIGN: tl.constexpr,
    GRAD_UNIT: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sum each chunk that is part of one run; one program for each chunk."""
    if not no_error(flag, ROWS * WIDTH):
        return
    index = tl.program_id(0)
    begin = index.to(tl.int64) * chunk
    key = tl.load(keys + begin)
    if key != tl.load(keys + begin + chunk - 1):
        return
    table = column_of(tl.full((ROWS,), 0, tl.int64) + key, tables, TABLES)
    width = tl.load(tables + TABLES + table) * UNIT
    columns = tl.arange(0, WIDTH)
    inside = columns[None, :] < width[:, None]
    total = sum_span(
        begin,
        begin + chunk,
        inside,
        places,
        scales,
        grads,
        shift,
        LOOKUPS,
        GRAD,
        GRAD_ALIGN,
        GRAD_UNIT,
        SCALED,
        ROWS,
        WIDTH,
        UNROLL,
    )
    tl.store(partials + index.to(tl.int64) * WIDTH + columns, total)


@triton.jit(do_not_specialize=["n", "shift", "chunk"])
def join_chunks(
    flag,
    keys,
    places,
    scales,
    tables,
    grads,
    partials,
    totals,
    n,
    counters,
    shift,
    chunk,
    TABLES: tl.constexpr,
    LOOKUPS: tl.constexpr,
    GRAD: tl.constexpr,
    GRAD_ALIGN: tl.constexpr,
    GRAD_UNIT: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    COUNTERS: tl.constexpr,
    PROBES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sum the long runs: one program for each multiple of `chunk`; the first multiple in a run sums the run.

    The first program also adds 1 to the step counts, whose addresses are in `counters`; the update, which
    runs next, reads the counts.
    """
    if not no_error(flag, ROWS * WIDTH):
        return
    if COUNTERS > 0 and tl.program_id(0) == 0:
        address = tl.load(counters + tl.arange(0, COUNTERS))
        counter = address.to(tl.pointer_type(tl.int64))
        tl.store(counter, tl.load(counter, mask=address != 0, other=0) + 1, mask=address != 0)
    index = tl.program_id(0).to(tl.int64) + 1
    middle = index * chunk
    key = tl.load(keys + middle)
    if key != tl.load(keys + middle - 1):
        return
    if tl.load(keys + tl.maximum(middle - chunk - 1, 0)) == key and index > 1:
        return
    head = begin_of_run(keys, key, middle - chunk, middle, PROBES)
    last = end_of_run(keys, key, middle, n.to(tl.int64), PROBES)
    if last - head <= chunk:
        return
    table = column_of(tl.full((ROWS,), 0, tl.int64) + key, tables, TABLES)
    width = tl.load(tables + TABLES + table) * UNIT
    columns = tl.arange(0, WIDTH)
    inside = columns[None, :] < width[:, None]
    first = (head + chunk - 1) // chunk
    behind = last // chunk
    total = sum_partials(first, behind, inside, partials, ROWS, WIDTH)
    for end in range(2):
        total += sum_span(
            tl.where(end == 0, head, behind * chunk),
            tl.where(end == 0, first * chunk, last),
            inside,
            places,
            scales,
            grads,
            shift,
            LOOKUPS,
            GRAD,
            GRAD_ALIGN,
            GRAD_UNIT,
            SCALED,
            ROWS,
            WIDTH,
            UNROLL,
        )
    tl.store(totals + index * WIDTH + columns, total.to(tl.float32))
