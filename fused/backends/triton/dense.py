# mypy: ignore-errors
# ruff: noqa: N803, D417
# Triton compiles this source: names of constants are in capitals; branches on them are taken at compile time.
"""The update of dense parameters: BLOCK elements of one parameter a program, any number of parameters."""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.arithmetic import aligned, column_of_program
from keyedopt.fused.backends.triton.layout import DENSE_FIELDS
from keyedopt.fused.backends.triton.rules import apply, rates, read_options

SIZE = tl.constexpr(DENSE_FIELDS.index("size"))
WEIGHT = tl.constexpr(DENSE_FIELDS.index("weight"))
GRAD = tl.constexpr(DENSE_FIELDS.index("grad"))
FIRST = tl.constexpr(DENSE_FIELDS.index("first"))
SECOND = tl.constexpr(DENSE_FIELDS.index("second"))
COUNT_AT = tl.constexpr(DENSE_FIELDS.index("count"))


@triton.jit
def elements(fields, begin, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Return the addresses of BLOCK elements from a begin that is a multiple of BLOCK."""
    return aligned(tl.load(fields) + begin * 4, tl.float32, ALIGN, 4) + tl.arange(0, BLOCK)


@triton.jit
def update_elements(
    fields,
    begin,
    size,
    scale,
    now,
    options,
    WHOLE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,
    SCALED: tl.constexpr,
    ALGORITHM: tl.constexpr,
    STATES: tl.constexpr,
    DECAY: tl.constexpr,
    BEFORE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update BLOCK elements; unless WHOLE only those before the end, each with an access of its own."""
    mask = None if WHOLE else begin + tl.arange(0, BLOCK) < size
    weight = elements(fields + WEIGHT * COLUMNS, begin, ALIGN, BLOCK)
    first = elements(fields + FIRST * COLUMNS, begin, ALIGN, BLOCK)
    second = elements(fields + SECOND * COLUMNS, begin, ALIGN, BLOCK)
    w = tl.load(weight, mask)
    g = tl.load(elements(fields + GRAD * COLUMNS, begin, ALIGN, BLOCK), mask)
    a = tl.load(first, mask) if STATES > 0 else 0.0
    b = tl.load(second, mask) if STATES > 1 else 0.0
    if SCALED:
        g = tl.div_rn(g, tl.broadcast_to(tl.load(scale), g.shape))
    if MAXIMIZE:
        g = -g
    w, a, b = apply(w, g, a, b, 0, now, options, ALGORITHM, STATES, DECAY, BEFORE, False)
    tl.store(weight, w, mask)
    if STATES > 0:
        tl.store(first, a, mask)
    if STATES > 1:
        tl.store(second, b, mask)


@triton.jit
def update_dense(
    parameters,
    step,
    lr,
    scale,
    COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,
    COUNT: tl.constexpr,
    SCALED: tl.constexpr,
    ALGORITHM: tl.constexpr,
    STATES: tl.constexpr,
    DECAY: tl.constexpr,
    BEFORE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update float32 parameters whose gradients and states have the same strides, without gaps.

    Args:
        parameters: columns of `DENSE_FIELDS`.
        step: see `STEP_FIELDS`.
        lr: one number.
        scale: the divisor of all gradients, float32; not read unless SCALED.
    """
    fields = parameters + column_of_program(parameters, COLUMNS)
    begin = (tl.program_id(0) - tl.load(fields)) * BLOCK
    size = tl.load(fields + SIZE * COLUMNS)
    options = read_options(step)
    count = 1.0
    if ALGORITHM != "sgd":
        count = tl.load(tl.load(fields + COUNT_AT * COLUMNS).to(tl.pointer_type(COUNT))).to(tl.float64)
    now = rates(tl.load(lr).to(tl.float64), count, step, ALGORITHM)
    if begin + BLOCK <= size:
        update_elements(
            fields,
            begin,
            size,
            scale,
            now,
            options,
            True,
            COLUMNS,
            ALIGN,
            SCALED,
            ALGORITHM,
            STATES,
            DECAY,
            BEFORE,
            MAXIMIZE,
            BLOCK,
        )
    else:
        update_elements(
            fields,
            begin,
            size,
            scale,
            now,
            options,
            False,
            COLUMNS,
            ALIGN,
            SCALED,
            ALGORITHM,
            STATES,
            DECAY,
            BEFORE,
            MAXIMIZE,
            BLOCK,
        )
