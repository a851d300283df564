# mypy: ignore-errors
# ruff: noqa: N803, D417
# Kernels are compiled from their source: annotations of tensors mean nothing there, constants are capitals,
# and a branch on a constant is taken when it is compiled.
"""The sums of gradients, written down instead of used: where a norm over all of them has to be known."""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.arithmetic import column_of, pointer
from keyedopt.fused.backends.triton.layout import TABLE_WORDS
from keyedopt.fused.backends.triton.reduce import sum_runs

UNITS = tl.constexpr(TABLE_WORDS.index("units"))
WEIGHT_AT = tl.constexpr(TABLE_WORDS.index("weight"))
FIRST_AT = tl.constexpr(TABLE_WORDS.index("first"))


@triton.jit(do_not_specialize=["shift", "chunk"])
def collect(
    alarm,
    keys,
    places,
    scales,
    starts,
    counts,
    ends,
    totals,
    tables,
    grads,
    ranks,
    shift,
    chunk,
    TABLES: tl.constexpr,
    LOOKUPS: tl.constexpr,
    GRAD: tl.constexpr,
    ALIGN: tl.constexpr,
    UNIT: tl.constexpr,
    GRAD_ALIGN: tl.constexpr,
    GRAD_UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Write the sums of the runs that begin in BLOCK sorted positions.

    Args:
        keys, places, scales, starts, counts, ends, totals, grads, shift, chunk: see `update.update`.
        tables: words of `TABLE_WORDS`, but `weight` is the address of the sums of a table, and `first` is how
            many runs there are before its own.
        ranks: (blocks,) how many runs there are before a block.
    """
    if tl.load(alarm) != 0:
        return
    program = tl.program_id(0)
    begin = program.to(tl.int64) * BLOCK
    columns = tl.arange(0, WIDTH)
    runs = tl.load(counts + program)
    last = tl.load(ends + program).to(tl.int64)
    rank = tl.load(ranks + program)
    for done in range(0, runs, ROWS):
        run = done + tl.arange(0, ROWS)
        live = run < runs
        position = begin + tl.load(starts + begin + run, mask=live, other=0).to(tl.int64)
        key = tl.load(keys + position, mask=live, other=0).to(tl.int64)
        words = tables + column_of(key, tables, TABLES)
        width = tl.load(words + UNITS * TABLES, mask=live, other=1) * UNIT
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
            totals,
            shift,
            chunk,
            LOOKUPS,
            GRAD,
            GRAD_ALIGN,
            GRAD_UNIT,
            SCALED,
            ROWS,
            WIDTH,
            UNROLL,
        )
        out = rank + run - tl.load(words + FIRST_AT * TABLES, mask=live, other=0)
        at = pointer(words + WEIGHT_AT * TABLES, live, tl.float32, ALIGN)[:, None]
        at += (out * width)[:, None] + columns[None, :]
        tl.store(at, g, mask=live[:, None] & inside)
