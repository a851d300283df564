# mypy: ignore-errors
# ruff: noqa: N803, D417, RET505
# Triton compiles this source: names of constants are in capitals; branches on them are taken at compile time.
"""The update: sum the gradients of a row, read the row and its state, apply the rule, write them back."""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.arithmetic import (
    column_of,
    pointer,
    round_randomly,
    round_to_nearest,
)
from keyedopt.fused.backends.triton.error_flag import no_error
from keyedopt.fused.backends.triton.layout import STEP_FIELDS, TABLE_FIELDS
from keyedopt.fused.backends.triton.reduce import gradients, sum_runs
from keyedopt.fused.backends.triton.rules import apply

UNITS = tl.constexpr(TABLE_FIELDS.index("units"))
WEIGHT_AT = tl.constexpr(TABLE_FIELDS.index("weight"))
FIRST_AT = tl.constexpr(TABLE_FIELDS.index("first"))
SECOND_AT = tl.constexpr(TABLE_FIELDS.index("second"))
COUNTER_AT = tl.constexpr(TABLE_FIELDS.index("counter"))
SEED = tl.constexpr(STEP_FIELDS.index("seed"))


@triton.jit
def draw(seed, count, row, table, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return uniform uint32, (ROWS, WIDTH), by Philox on seed, step, table, row and column; four a batch."""
    quarter: tl.constexpr = WIDTH // 4
    column = tl.arange(0, quarter)[None, :].to(tl.uint32) + tl.zeros((ROWS, quarter), tl.uint32)
    low = row.to(tl.uint32)[:, None] + tl.zeros((ROWS, quarter), tl.uint32)
    # row numbers may exceed 2³², columns do not exceed 2¹⁶
    high = ((row >> 32).to(tl.uint32) + (table.to(tl.uint32) << 12))[:, None] + tl.zeros_like(low)
    step = count.to(tl.uint32) + tl.zeros_like(low)
    a, b, c, d = tl.philox(seed, low, high, column, step, 7)
    pairs = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(pairs, (ROWS, WIDTH))


@triton.jit
def load_state(fields, row, live, inside, columns, width, KIND: tl.constexpr, ALIGN: tl.constexpr):
    """Load a state of these rows: (ROWS, WIDTH), or (ROWS, 1), or 0 without a state."""
    if KIND == "full":
        at = pointer(fields, live, tl.float32, ALIGN)[:, None] + ((row * width)[:, None] + columns[None, :])
        return tl.load(at, mask=live[:, None] & inside, other=0.0)
    elif KIND == "row":
        return tl.load(pointer(fields, live, tl.float32, 4) + row, mask=live, other=0.0)[:, None]
    else:
        return 0.0


@triton.jit
def store_state(fields, value, row, live, inside, columns, width, KIND: tl.constexpr, ALIGN: tl.constexpr):
    """Store a state of these rows."""
    if KIND == "full":
        at = pointer(fields, live, tl.float32, ALIGN)[:, None] + ((row * width)[:, None] + columns[None, :])
        tl.store(at, value, mask=live[:, None] & inside)
    elif KIND == "row":
        # the value is the same in every thread of a row; a sum over one column takes the column away
        tl.store(pointer(fields, live, tl.float32, 4) + row, tl.sum(value, 1), mask=live)


@triton.jit(do_not_specialize=["n", "shift", "chunks", "chunk"])
def update(
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
    step,
    lr,
    count,
    n,
    shift,
    chunks,
    chunk,
    SUMMED: tl.constexpr,
    TABLES: tl.constexpr,
    LOOKUPS: tl.constexpr,
    WEIGHT: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    COUNTED: tl.constexpr,
    GRAD: tl.constexpr,
    ALIGN: tl.constexpr,
    UNIT: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    GRAD_ALIGN: tl.constexpr,
    GRAD_UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    ALGORITHM: tl.constexpr,
    STATES: tl.constexpr,
    DECAY: tl.constexpr,
    BEFORE: tl.constexpr,
    LIMITED: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    RANDOM: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Update the rows whose runs begin in BLOCK sorted positions, ROWS at a time.

    Args:
        flag: see `error_flag`; where it was raised nothing is done.
        keys, places, scales, starts, counts, ends: see `sort.find_runs`; with SUMMED every position is a row,
            or none, and has its gradient at its place, so `starts`, `counts` and `ends` are not read.
        partials, chunks, chunk: see `chunks.sum_chunks`.
        tables, grads, step: columns of `TABLE_FIELDS`, `GRAD_FIELDS` and `STEP_FIELDS`.
        lr, count: one number each.
        n: number of positions.
        shift: see `reduce`.
    """
    if not no_error(flag, ROWS * WIDTH):
        return
    program = tl.program_id(0)
    begin = program.to(tl.int64) * BLOCK
    columns = tl.arange(0, WIDTH)
    rate = tl.load(lr).to(tl.float64)
    steps = tl.load(count).to(tl.float64)
    if SUMMED:
        runs = tl.minimum(n - begin, BLOCK).to(tl.int32)
        last = begin + BLOCK
    else:
        runs = tl.load(counts + program)
        last = tl.load(ends + program).to(tl.int64)
    for done in range(0, runs, ROWS):
        run = done + tl.arange(0, ROWS)
        live = run < runs
        if SUMMED:
            position = begin + run
        else:
            position = begin + tl.load(starts + begin + run, mask=live, other=0).to(tl.int64)
        key = tl.load(keys + position, mask=live, other=0).to(tl.int64)
        if SUMMED:
            live = live & (key >= 0)  # a key of −1 is padding
        table = column_of(key, tables, TABLES)
        fields = tables + table
        row = key - tl.load(fields, mask=live, other=0)
        width = tl.load(fields + UNITS * TABLES, mask=live, other=1).to(tl.int32) * UNIT
        inside = columns[None, :] < width[:, None]
        # the row and its state do not depend on the gradients: load them first, to overlap both loads
        place = (row * width)[:, None] + columns[None, :]
        write = live[:, None] & inside
        weight = pointer(fields + WEIGHT_AT * TABLES, live, WEIGHT, ROW_ALIGN)[:, None] + place
        w = tl.load(weight, mask=write, other=0.0).to(tl.float32)
        a = load_state(fields + FIRST_AT * TABLES, row, live, inside, columns, width, FIRST, ALIGN)
        if SECOND != "row":
            b = load_state(fields + SECOND_AT * TABLES, row, live, inside, columns, width, SECOND, ALIGN)
        if SUMMED:
            g = gradients(
                position,
                live,
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
                WIDTH,
            )
        else:
            end = begin + tl.load(starts + begin + run + 1, mask=run + 1 < runs, other=0).to(tl.int64)
            end = tl.where(run + 1 < runs, end, last)
            length = tl.where(live, end - position, 0)
            g = sum_runs(
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
                LOOKUPS,
                GRAD,
                GRAD_ALIGN,
                GRAD_UNIT,
                SCALED,
                FOLD,
                ROWS,
                WIDTH,
            )
        # the rest of what is read, after the sum, which needs the registers
        if SECOND == "row":
            b = load_state(fields + SECOND_AT * TABLES, row, live, inside, columns, width, SECOND, ALIGN)
        t = steps
        if COUNTED:
            counter = pointer(fields + COUNTER_AT * TABLES, live, tl.int64, 8) + row
            counted = tl.load(counter, mask=live, other=0) + 1
            t = counted.to(tl.float64)[:, None]
        if MAXIMIZE:
            g = -g
        w, a, b = apply(w, g, a, b, width, rate, t, step, ALGORITHM, STATES, DECAY, BEFORE, LIMITED)
        tl.debug_barrier()  # all threads of a row read its count and its state before one writes
        if COUNTED:
            tl.store(counter, counted, mask=live)
        if RANDOM:
            bits = draw(tl.load(step + SEED), t, row, table, ROWS, WIDTH)
            tl.store(weight, round_randomly(w, bits, WEIGHT), mask=write)
        else:
            tl.store(weight, round_to_nearest(w, WEIGHT), mask=write)
        store_state(fields + FIRST_AT * TABLES, a, row, live, inside, columns, width, FIRST, ALIGN)
        store_state(fields + SECOND_AT * TABLES, b, row, live, inside, columns, width, SECOND, ALIGN)
