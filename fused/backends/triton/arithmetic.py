# mypy: ignore-errors
# ruff: noqa: N803, SIM300
# Triton compiles this source: names of constants are in capitals; branches on them are taken at compile time.
"""Device functions for all kernels: fields, addresses, norms, compensated sums, rounding."""

import os

import triton
import triton.language as tl

#: Whether kernels run in Triton's interpreter, which truncates float32 to bfloat16; hardware rounds.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def number(step, INDEX: tl.constexpr):
    """Read a number of the step, in float32."""
    return tl.load(step + INDEX).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def pointer(fields, live, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    """Read addresses, and tell the compiler that they are multiples of ALIGN bytes."""
    return tl.multiple_of(tl.load(fields, mask=live, other=0).to(tl.pointer_type(DTYPE)), [ALIGN])


@triton.jit
def aligned(address, DTYPE: tl.constexpr, ALIGN: tl.constexpr, UNIT: tl.constexpr):
    """Return addresses of rows as pointers: multiples of ALIGN bytes, or of UNIT elements if that is less.

    ALIGN is the alignment of the addresses of the present tensors (`device_buffers.alignment`), and UNIT
    divides every width, so a view at an odd address gets narrower loads. Addresses are int64: a table may
    have more than 2³¹ elements, see `tests/fused/test_triton_far.py`.
    """
    least: tl.constexpr = min(ALIGN, UNIT * DTYPE.primitive_bitwidth // 8)
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), [least])


@triton.jit
def column_of(position, fields, COLUMNS: tl.constexpr):
    """Return the last column that begins at a position or before it, by bisection, bit by bit.

    A comparison with all columns at once would be a matrix, whose layout is not that of the rows.
    """
    column = tl.zeros_like(position).to(tl.int32)
    for bit in tl.static_range(19, -1, -1):  # at most `device_buffers.MOST` columns
        if COLUMNS > 2**bit:
            begins = tl.load(fields + column + 2**bit)
            column = tl.where(position >= begins, column + 2**bit, column)
    return column


@triton.jit
def column_of_program(begins, COLUMNS: tl.constexpr):
    """Return the last column whose first program is this one or an earlier one; begins of columns ascend.

    Up to 1024 columns are compared at once; more would not fit into the registers of a program.
    """
    program = tl.program_id(0)
    if COLUMNS <= 1024:
        column = tl.sum((program >= tl.load(begins + tl.arange(0, COLUMNS))).to(tl.int32), 0) - 1
    else:
        column = program * 0
        for bit in tl.static_range(19, -1, -1):
            if COLUMNS > 2**bit:
                column = tl.where(program >= tl.load(begins + column + 2**bit), column + 2**bit, column)
    return column


@triton.jit
def add_exactly(high, low, more):
    """Add to a sum of two parts; the second part is the rounding error of the first (Knuth's 2Sum)."""
    total = high + more
    part = total - high
    return total, low + ((high - (total - part)) + (more - part))


@triton.jit
def total_of(high, low):
    """Return the sum of the two parts; if the first is infinite, the second is NaN and is ignored."""
    return tl.where(low == low, high + low, high)


@triton.jit
def in_float64(high, low):
    """Return the sum of the two parts in float64, without loss."""
    return tl.where(low == low, high.to(tl.float64) + low.to(tl.float64), high.to(tl.float64))


@triton.jit
def quotient(numerator, denominator):
    """Divide, with 0 / 0 = 0."""
    undefined = (numerator == 0) & (denominator == 0)
    return tl.where(undefined, 0.0, tl.div_rn(numerator, tl.where(undefined, 1.0, denominator)))


@triton.jit
def row_mean_square(x, width):
    """Return mean(x²) of every row, as a column; x is 0 beyond the width."""
    return tl.div_rn(tl.sum(x * x, 1), width.to(tl.float32))[:, None]


@triton.jit
def row_norm(x):
    """Return ‖x‖₂ of every row, as a column; a power of two keeps the squares from over- and underflow."""
    largest = tl.max(tl.abs(x), 1)
    exponent = tl.minimum(tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 255, 1), 253)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = x * inverse[:, None]
    return (power * tl.sqrt_rn(tl.sum(scaled * scaled, 1)))[:, None]


@triton.jit
def trust_ratio(numerator, denominator):
    """Divide; return 1 if either number is 0."""
    undefined = (numerator == 0) | (denominator == 0)
    return tl.where(undefined, 1.0, tl.div_rn(numerator, tl.where(undefined, 1.0, denominator)))


@triton.jit
def correction(log_beta, count):
    """Return 1 − βᵗ, computed in float64 because βᵗ may be close to 1."""
    return (1.0 - tl.exp(count * log_beta)).to(tl.float32)


@triton.jit
def round_randomly(x, bits, HALF: tl.constexpr):
    """Round float32 up or down to the grid of float16 or bfloat16, up with the probability of the remainder.

    Args:
        x: the numbers.
        bits: uniform random uint32, of which the upper 24 bits are used, as many as a remainder has.
        HALF: the half precision dtype.
    """
    # one unit in the last place of HALF at x, a power of two, not below the smallest subnormal number
    digits: tl.constexpr = 10 if HALF == tl.float16 else 7
    least: tl.constexpr = (127 - 24) if HALF == tl.float16 else 1
    largest: tl.constexpr = 65504.0 if HALF == tl.float16 else 3.3895313892515355e38
    exponent = ((x.to(tl.int32, bitcast=True) >> 23) & 255) - digits
    exponent = tl.minimum(tl.maximum(exponent, least), 253)
    within = tl.abs(x) <= largest
    unit = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = tl.where(within, tl.abs(x) * inverse, 0.0)
    down = tl.floor(scaled)
    chance = (bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2⁻²⁴
    size = tl.minimum((down + tl.where(scaled - down > chance, 1.0, 0.0)) * unit, largest)
    return tl.where(within, tl.where(x < 0, -size, size), x).to(HALF)


@triton.jit
def round_to_nearest(x, HALF: tl.constexpr):
    """Round float32 to a dtype, ties to even; one instruction except in the interpreter."""
    if INTERPRETED and HALF == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(HALF)
