# mypy: ignore-errors
# ruff: noqa: N803, D417, RET505
# Triton compiles this source: names of constants are in capitals; branches on them are taken at compile time.
"""The update: sum the gradients of a row, read the row and its state, apply the rule, write them back."""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.arithmetic import (
    aligned,
    column_of,
    pointer,
    round_randomly,
    round_to_nearest,
)
from keyedopt.fused.backends.triton.error_flag import no_error
from keyedopt.fused.backends.triton.layout import STEP_FIELDS, TABLE_FIELDS
from keyedopt.fused.backends.triton.reduce import gradients_at, runs_in_block, sum_runs
from keyedopt.fused.backends.triton.rules import apply, rates, read_options

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
def state_of_block(fields, row, elements, live, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Return the address of the state of each row; the state itself if it is one number; or 0 without one."""
    if KIND == "full":
        return tl.load(fields, mask=live, other=0) + elements * (DTYPE.primitive_bitwidth // 8)
    elif KIND == "row":
        return tl.load(pointer(fields, live, tl.float32, 4) + row, mask=live, other=0.0)
    else:
        return 0.0


@triton.jit
def load_state(state, index, write, columns, KIND: tl.constexpr, FORM: tl.constexpr):
    """Return a state of the rows of a tile: (ROWS, WIDTH), or (ROWS, 1), or 0 without a state."""
    if KIND == "full":
        at = aligned(tl.gather(state, index, 0), FORM[0], FORM[1], FORM[2])[:, None] + columns[None, :]
        return tl.load(at, mask=write, other=0.0).to(tl.float32)
    elif KIND == "row":
        return tl.gather(state, index, 0)[:, None]
    else:
        return 0.0


@triton.jit
def store_state(state, value, index, write, columns, KIND: tl.constexpr, FORM: tl.constexpr):
    """Store a state of the rows of a tile; return that of the block, which has the new single numbers."""
    if KIND == "full":
        at = aligned(tl.gather(state, index, 0), FORM[0], FORM[1], FORM[2])[:, None] + columns[None, :]
        tl.store(at, round_to_nearest(value, FORM[0]), mask=write)
    elif KIND == "row":
        rows: tl.constexpr = index.shape[0]
        behind = tl.arange(0, state.shape[0]) - tl.min(index, 0)
        new = tl.gather(tl.sum(value, 1), tl.minimum(tl.maximum(behind, 0), rows - 1), 0)
        state = tl.where((behind >= 0) & (behind < rows), new, state)
    return state


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
    STATE: tl.constexpr,
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
    options = read_options(step)
    rate = tl.load(lr).to(tl.float64)
    t = tl.load(count).to(tl.float64)
    if not COUNTED:
        now = rates(rate, t, step, ALGORITHM)
    # Each run of the block has one thread here, which reads what all columns of its row share.
    run = tl.arange(0, BLOCK)
    if SUMMED:
        runs = tl.minimum(n - begin, BLOCK).to(tl.int32)
        last = begin
        start = run
    else:
        runs = tl.load(counts + program)
        last = tl.load(ends + program).to(tl.int64)
        start, length = runs_in_block(begin, runs, last, starts, chunk, BLOCK)
    key = tl.load(keys + begin + start, mask=run < runs, other=-1).to(tl.int64)
    live = key >= 0  # a key of −1 is padding
    if SUMMED:
        length = live.to(tl.int32)
    table = column_of(key, tables, TABLES)
    fields = tables + table
    row = key - tl.load(fields, mask=live, other=0)
    units = tl.load(fields + UNITS * TABLES, mask=live, other=0).to(tl.int32)
    elements = row * (units * UNIT)
    size: tl.constexpr = WEIGHT.primitive_bitwidth // 8
    weights = tl.load(fields + WEIGHT_AT * TABLES, mask=live, other=0) + elements * size
    first = fields + FIRST_AT * TABLES
    second = fields + SECOND_AT * TABLES
    state1 = state_of_block(first, row, elements, live, FIRST, STATE)
    state2 = state_of_block(second, row, elements, live, SECOND, tl.float32)
    if COUNTED:
        counter = pointer(fields + COUNTER_AT * TABLES, live, tl.int64, 8) + row
        counted = tl.load(counter, mask=live, other=0) + 1
    form: tl.constexpr = (LOOKUPS, GRAD, GRAD_ALIGN, GRAD_UNIT, SCALED)
    source = (places, scales, grads, shift)
    block = (start, length) + gradients_at(begin + run, begin + run < n, source, form)  # noqa: RUF005
    bounds = (begin, runs, last, starts)
    sums = (partials, chunks, chunk)
    form1: tl.constexpr = (STATE, ALIGN, UNIT)
    form2: tl.constexpr = (tl.float32, ALIGN, UNIT)
    for done in range(0, runs, ROWS):
        index = done + tl.arange(0, ROWS)
        width = tl.gather(units, index, 0) * UNIT
        inside = columns[None, :] < width[:, None]
        # the row and its state do not depend on the gradients: load them first, to overlap both loads
        weight = aligned(tl.gather(weights, index, 0), WEIGHT, ROW_ALIGN, UNIT)[:, None] + columns[None, :]
        w = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
        a = load_state(state1, index, inside, columns, FIRST, form1)
        b = load_state(state2, index, inside, columns, SECOND, form2)
        g = sum_runs(index, inside, block, bounds, sums, source, form, FOLD, BLOCK, WIDTH)
        if MAXIMIZE:
            g = -g
        steps = t
        if COUNTED:
            steps = tl.gather(counted, index, 0).to(tl.float64)[:, None]
            now = rates(rate, steps, step, ALGORITHM)
        w, a, b = apply(w, g, a, b, width, now, options, ALGORITHM, STATES, DECAY, BEFORE, LIMITED)
        tl.debug_barrier()  # all threads read the row, the counts and the states before one writes
        if RANDOM:
            rows = tl.gather(row, index, 0)
            bits = draw(tl.load(step + SEED), steps, rows, tl.gather(table, index, 0), ROWS, WIDTH)
            tl.store(weight, round_randomly(w, bits, WEIGHT), mask=inside)
        else:
            tl.store(weight, round_to_nearest(w, WEIGHT), mask=inside)
        state1 = store_state(state1, a, index, inside, columns, FIRST, form1)
        state2 = store_state(state2, b, index, inside, columns, SECOND, form2)
    if COUNTED:
        tl.store(counter, counted, mask=live)
    if FIRST == "row":
        tl.store(pointer(first, live, tl.float32, 4) + row, state1, mask=live)
    if SECOND == "row":
        tl.store(pointer(second, live, tl.float32, 4) + row, state2, mask=live)
