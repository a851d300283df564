# mypy: ignore-errors
# ruff: noqa: N803, D417
# Triton compiles this source: names of constants are in capitals; branches on them are taken at compile time.
"""Kernels that write the sums of gradients to memory, for a norm over all of them.

Only the device knows the number of sums, so that no one synchronizes.
"""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.arithmetic import column_of, pointer
from keyedopt.fused.backends.triton.error_flag import no_error
from keyedopt.fused.backends.triton.layout import TABLE_FIELDS
from keyedopt.fused.backends.triton.reduce import sum_runs

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


@triton.jit(do_not_specialize=["shift", "chunks", "chunk"])
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
        shift, chunks, chunk: see `update.update`.
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
    for done in range(0, runs, ROWS):
        run = done + tl.arange(0, ROWS)
        live = run < runs
        position = begin + tl.load(starts + begin + run, mask=live, other=0).to(tl.int64)
        key = tl.load(keys + position, mask=live, other=0).to(tl.int64)
        table = column_of(key, tables, TABLES)
        fields = tables + table
        row = key - tl.load(fields, mask=live, other=0)
        live = live & (row < tl.load(fields + HEIGHT * TABLES, mask=live, other=0))
        width = tl.load(fields + UNITS * TABLES, mask=live, other=1) * UNIT
        end = begin + tl.load(starts + begin + run + 1, mask=run + 1 < runs, other=0).to(tl.int64)
        end = tl.where(run + 1 < runs, end, last)
        inside = columns[None, :] < width[:, None]
        g = sum_runs(
            position,
            tl.where(live, end - position, 0),
            inside,
            places,
            scales,
            grads,
            partials,
            shift,
            chunks,
            chunk,
            LOOKUPS,
            GRAD,
            GRAD_ALIGN,
            GRAD_UNIT,
            SCALED,
            FOLD,
            ROWS,
            WIDTH,
        )
        out = rank + run - tl.load(firsts + table, mask=live, other=0)
        tl.store(pointer(fields + ROWS_AT * TABLES, live, tl.int64, 8) + out, row, mask=live)
        at = pointer(fields + WEIGHT_AT * TABLES, live, tl.float32, ALIGN)[:, None]
        at += (out * width)[:, None] + columns[None, :]
        tl.store(at, g, mask=live[:, None] & inside)
