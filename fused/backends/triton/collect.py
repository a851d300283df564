# mypy: ignore-errors
# ruff: noqa: N803, D417
# Triton compiles this source: names of constants are in capitals; branches on them are taken at compile time.
"""Kernels that write the sums of gradients to memory, for a norm over all of them.

Only the device knows the number of sums, so that no one synchronizes.
"""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.arithmetic import aligned, column_of, pointer
from keyedopt.fused.backends.triton.error_flag import no_error
from keyedopt.fused.backends.triton.layout import TABLE_FIELDS
from keyedopt.fused.backends.triton.reduce import gradients_at, runs_in_block, sum_runs

UNITS = tl.constexpr(TABLE_FIELDS.index("units"))
WEIGHT_AT = tl.constexpr(TABLE_FIELDS.index("weight"))
ROWS_AT = tl.constexpr(TABLE_FIELDS.index("first"))
HEIGHT = tl.constexpr(TABLE_FIELDS.index("second"))


@triton.jit(do_not_specialize=["n", "steps"])
def count_runs(
    keys,
    starts,
    counts,
    before,
    tables,
    firsts,
    n,
    steps,
    TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the number of runs before each table, and the number of all runs; one program.

    Args:
        keys, starts, counts: see `sort.find_runs`.
        before: (blocks + 1,) number of runs before each block, then of all runs.
        tables: columns of `TABLE_FIELDS`.
        firsts: (TABLES + 1,) out.
        n: number of positions.
        steps: of a bisection of the positions.
    """
    table = tl.arange(0, TABLES)
    base = tl.load(tables + table)
    low = tl.zeros((TABLES,), tl.int64)
    high = low + n
    for _ in range(steps):
        middle = (low + high) // 2
        searched = low < high
        less = tl.load(keys + middle, mask=searched, other=0).to(tl.int64) < base
        low = tl.where(searched & less, middle + 1, low)
        high = tl.where(searched & (less == 0), middle, high)
    # a run begins where a table begins, unless the table begins after the last position
    block = tl.where(low < n, low // BLOCK, 0)
    within = (low - block * BLOCK).to(tl.int32)
    first = tl.zeros((TABLES,), tl.int32)
    last = tl.load(counts + block)
    for _ in tl.static_range(9):  # a block has at most 256 runs
        middle = (first + last) // 2
        searched = (first < last) & (low < n)
        less = tl.load(starts + block * BLOCK + middle, mask=searched, other=0).to(tl.int32) < within
        first = tl.where(searched & less, middle + 1, first)
        last = tl.where(searched & (less == 0), middle, last)
    total = tl.load(before + tl.cdiv(n.to(tl.int64), BLOCK))
    tl.store(firsts + table, tl.where(low < n, tl.load(before + block) + first, total))
    tl.store(firsts + TABLES, total)


@triton.jit(do_not_specialize=["n", "shift", "chunks", "chunk"])
def collect(
    flag,
    keys,
    places,
    scales,
    starts,
    counts,
    ends,
    partials,
    tables,
    grads,
    before,
    firsts,
    n,
    shift,
    chunks,
    chunk,
    TABLES: tl.constexpr,
    LOOKUPS: tl.constexpr,
    GRAD: tl.constexpr,
    ALIGN: tl.constexpr,
    UNIT: tl.constexpr,
    GRAD_ALIGN: tl.constexpr,
    GRAD_UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the sums of the runs that begin in BLOCK sorted positions.

    Args:
        keys, places, scales, starts, counts, ends, partials, grads: see `update.update`.
        n, shift, chunks, chunk: see `update.update`.
        tables: columns of `TABLE_FIELDS`, but `weight` is the address of the sums of a table, `first` that of
            their row numbers, and `second` the number of rows of the table; later rows are padding.
        before, firsts: see `count_runs`.
    """
    if not no_error(flag, ROWS * WIDTH):
        return
    program = tl.program_id(0)
    begin = program.to(tl.int64) * BLOCK
    columns = tl.arange(0, WIDTH)
    runs = tl.load(counts + program)
    last = tl.load(ends + program).to(tl.int64)
    rank = tl.load(before + program)
    start, length = runs_in_block(begin, runs, last, starts, chunk, BLOCK)
    run = tl.arange(0, BLOCK)
    key = tl.load(keys + begin + start, mask=run < runs, other=0).to(tl.int64)
    table = column_of(key, tables, TABLES)
    fields = tables + table
    row = key - tl.load(fields)
    live = (run < runs) & (row < tl.load(fields + HEIGHT * TABLES))
    units = tl.where(live, tl.load(fields + UNITS * TABLES), 0).to(tl.int32)
    out = rank + run - tl.load(firsts + table)
    tl.store(pointer(fields + ROWS_AT * TABLES, live, tl.int64, 8) + out, row, mask=live)
    sums = tl.load(fields + WEIGHT_AT * TABLES) + out * (units * UNIT) * 4
    form: tl.constexpr = (LOOKUPS, GRAD, GRAD_ALIGN, GRAD_UNIT, SCALED)
    source = (places, scales, grads, shift)
    block = (start, length) + gradients_at(begin + run, begin + run < n, source, form)  # noqa: RUF005
    bounds = (begin, runs, last, starts)
    totals = (partials, chunks, chunk)
    for done in range(0, runs, ROWS):
        index = done + tl.arange(0, ROWS)
        inside = columns[None, :] < (tl.gather(units, index, 0) * UNIT)[:, None]
        g = sum_runs(index, inside, block, bounds, totals, source, form, FOLD, BLOCK, WIDTH)
        at = aligned(tl.gather(sums, index, 0), tl.float32, ALIGN, UNIT)[:, None] + columns[None, :]
        tl.store(at, g, mask=inside)
