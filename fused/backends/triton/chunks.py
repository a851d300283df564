# mypy: ignore-errors
# ruff: noqa: N803, D417
# Triton compiles this source: names of constants are in capitals; branches on them are taken at compile time.
"""Kernels that sum the gradients of long runs, each by many programs.

The positions are divided into chunks of the same length, a power of two. One group of threads sums each chunk
that lies in one run, before the update; then one group sums each 2 ** FOLD such chunks in sequence, a fold.
`reduce.sum_runs` adds the sums of the chunks and folds in a run to those of its two ends. So no group of
threads sums more than two chunks of gradients, and the result does not depend on the order of programs.

Indices of chunks and positions are int64. The number of positions that a group sums is int32, see
`lookup_batch.MOST_LOOKUPS`.

The sums are in one buffer: a row for each chunk, then a row for each fold; a row has the sums, then their
rounding errors.
"""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.arithmetic import column_of
from keyedopt.fused.backends.triton.error_flag import no_error
from keyedopt.fused.backends.triton.reduce import add_chunks, sum_positions


@triton.jit
def inside_one_run(index, limit, keys, tables, chunk, TABLES: tl.constexpr, UNIT: tl.constexpr):
    """Return which pieces of 2 ** chunk positions lie in one run, and the width of their rows."""
    live = index < limit
    begin = index << chunk
    key = tl.load(keys + begin, mask=live, other=0)
    last = tl.load(keys + begin + (tl.full(index.shape, 1, tl.int64) << chunk) - 1, mask=live, other=0)
    table = column_of(key.to(tl.int64), tables, TABLES)
    return live & (key == last), tl.load(tables + TABLES + table) * UNIT


@triton.jit
def store_sums(partials, row, high, low, write, WIDTH: tl.constexpr):
    """Store sums and their rounding errors in some rows."""
    at = partials + (row * (2 * WIDTH))[:, None] + tl.arange(0, WIDTH)[None, :]
    tl.store(at, high, mask=write)
    tl.store(at + WIDTH, low, mask=write)


@triton.jit(do_not_specialize=["chunks", "chunk", "shift"])
def sum_chunks(
    flag,
    keys,
    places,
    scales,
    tables,
    grads,
    partials,
    counters,
    chunks,
    chunk,
    shift,
    TABLES: tl.constexpr,
    LOOKUPS: tl.constexpr,
    GRAD: tl.constexpr,
    GRAD_ALIGN: tl.constexpr,
    GRAD_UNIT: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    COUNTERS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sum ROWS chunks, each if it lies in one run.

    The first program also adds 1 to the step counts, whose addresses are in `counters`; the update, which
    runs later, reads the counts.

    Args:
        flag, keys, places, scales, tables, grads, shift: see `update.update`.
        partials: out.
        chunks: number of chunks.
        chunk: a chunk has 2 ** chunk positions.
    """
    if not no_error(flag, ROWS * WIDTH):
        return
    if COUNTERS > 0 and tl.program_id(0) == 0:
        address = tl.load(counters + tl.arange(0, COUNTERS))
        counter = address.to(tl.pointer_type(tl.int64))
        tl.store(counter, tl.load(counter, mask=address != 0, other=0) + 1, mask=address != 0)
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live, width = inside_one_run(index, chunks, keys, tables, chunk, TABLES, UNIT)
    inside = tl.arange(0, WIDTH)[None, :] < width[:, None]
    length = live.to(tl.int32) << chunk
    zeros = tl.zeros((ROWS, WIDTH), tl.float32)
    form: tl.constexpr = (LOOKUPS, GRAD, GRAD_ALIGN, GRAD_UNIT, SCALED)
    source = (places, scales, grads, shift)
    high, low = sum_positions(
        zeros, zeros, index << chunk, length, length * 0, chunk, inside, source, form, WIDTH, UNROLL
    )
    store_sums(partials, index, high, low, live[:, None] & inside, WIDTH)


@triton.jit(do_not_specialize=["chunks", "chunk"])
def fold_chunks(
    flag,
    keys,
    tables,
    partials,
    chunks,
    chunk,
    TABLES: tl.constexpr,
    UNIT: tl.constexpr,
    FOLD: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Add the sums of ROWS times 2 ** FOLD chunks, each 2 ** FOLD if they lie in one run.

    Args:
        flag, keys, tables, partials, chunks, chunk: see `sum_chunks`.
    """
    if not no_error(flag, ROWS * WIDTH):
        return
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live, width = inside_one_run(index, chunks >> FOLD, keys, tables, chunk + FOLD, TABLES, UNIT)
    inside = tl.arange(0, WIDTH)[None, :] < width[:, None]
    zeros = tl.zeros((ROWS, WIDTH), tl.float32)
    first = index << FOLD
    number = live.to(tl.int32) << FOLD
    high, low = add_chunks(zeros, zeros, first, number, inside, partials, chunks, 0, WIDTH)
    store_sums(partials, chunks + index, high, low, live[:, None] & inside, WIDTH)
