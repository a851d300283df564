# mypy: ignore-errors
# ruff: noqa: N803
# Triton compiles this source: names of constants are in capitals; branches on them are taken at compile time.
"""The algorithms, one device function each, in the order of its equations; `keyedopt.fused` documents them.

A rule takes rows (ROWS, WIDTH) in float32, 0 beyond the width of a row: the weight w, the gradient g, and
the states a and b; a state with one number for each row is (ROWS, 1). It returns the new weight and states.
`now` are the `rates`, `step` the `read_options`.
"""

import triton
import triton.language as tl

from keyedopt.fused.backends.triton.arithmetic import (
    correction,
    number,
    quotient,
    row_mean_square,
    row_norm,
    trust_ratio,
)
from keyedopt.fused.backends.triton.layout import STEP_FIELDS

EPS = tl.constexpr(STEP_FIELDS.index("eps"))
BETA1 = tl.constexpr(STEP_FIELDS.index("beta1"))
BETA2 = tl.constexpr(STEP_FIELDS.index("beta2"))
REST1 = tl.constexpr(STEP_FIELDS.index("rest1"))
REST2 = tl.constexpr(STEP_FIELDS.index("rest2"))
LOG1 = tl.constexpr(STEP_FIELDS.index("log1"))
LOG2 = tl.constexpr(STEP_FIELDS.index("log2"))
WEIGHT_DECAY = tl.constexpr(STEP_FIELDS.index("weight_decay"))
MOMENTUM = tl.constexpr(STEP_FIELDS.index("momentum"))
UNDAMPED = tl.constexpr(STEP_FIELDS.index("undamped"))
ETA = tl.constexpr(STEP_FIELDS.index("eta"))
LR_DECAY = tl.constexpr(STEP_FIELDS.index("lr_decay"))
MAX_NORM = tl.constexpr(STEP_FIELDS.index("max_norm"))
FIRST = tl.constexpr(STEP_FIELDS.index("first"))
NESTEROV = tl.constexpr(STEP_FIELDS.index("nesterov"))
SEED = tl.constexpr(STEP_FIELDS.index("seed"))


@triton.jit
def decayed(g, w, step, DECAY: tl.constexpr):
    """G ← g + λ w (L2)."""
    if DECAY == "l2":
        g = g + step[WEIGHT_DECAY] * w
    return g


@triton.jit
def beside(direction, w, step, DECAY: tl.constexpr):
    """Direction + λ w (decoupled)."""
    if DECAY == "decoupled":
        direction = direction + step[WEIGHT_DECAY] * w
    return direction


@triton.jit
def read_options(step):
    """Return the numbers of a step, in float32; in a loop the compiler would read them again and again."""
    options = ()
    for index in tl.static_range(SEED):
        options = options + (number(step, index),)  # noqa: RUF005
    return options


@triton.jit
def rates(lr, count, step, ALGORITHM: tl.constexpr):
    """Return γ, γ / (1 + (t − 1) η), 1 − β₁ᵗ and 1 − β₂ᵗ, as far as the algorithm uses them, else 1."""
    after = 1.0
    c1 = 1.0
    c2 = 1.0
    if ALGORITHM == "adagrad" or ALGORITHM == "rowwise_adagrad":
        decay = tl.load(step + LR_DECAY).to(tl.float64, bitcast=True)
        after = (lr / (1.0 + (count - 1.0) * decay)).to(tl.float32)
    elif ALGORITHM != "sgd" and ALGORITHM != "lars_sgd":
        c1 = correction(tl.load(step + LOG1).to(tl.float64, bitcast=True), count)
        c2 = correction(tl.load(step + LOG2).to(tl.float64, bitcast=True), count)
    return lr.to(tl.float32), after, c1, c2


@triton.jit
def sgd(w, g, b, now, step, DECAY: tl.constexpr, STATES: tl.constexpr):
    """B ← μ b + (1 − τ) g, or g at first; w ← w − γ b."""
    g = decayed(g, w, step, DECAY)
    direction = g
    if STATES == 1:
        momentum = step[MOMENTUM]
        b = tl.where(step[FIRST] != 0, g, momentum * b + step[UNDAMPED] * g)
        direction = tl.where(step[NESTEROV] != 0, g + momentum * b, b)
    w = w - now[0] * beside(direction, w, step, DECAY)
    return w, b


@triton.jit
def adagrad(w, g, s, now, step, DECAY: tl.constexpr):
    """S ← s + g²; w ← w − γ g / (√s + ε)."""
    g = decayed(g, w, step, DECAY)
    s = s + g * g
    moved = w - now[1] * quotient(g, tl.sqrt_rn(s) + step[EPS])
    if DECAY == "decoupled":
        moved = moved - now[0] * (step[WEIGHT_DECAY] * w)
    return moved, s


@triton.jit
def rowwise_adagrad(w, g, s, width, now, step, DECAY: tl.constexpr, LIMITED: tl.constexpr):
    """S ← s + mean(g²); w ← w − γ g / (√s + ε); w ← w · min(1, max_norm / ‖w‖)."""
    g = decayed(g, w, step, DECAY)
    s = s + row_mean_square(g, width)
    # Divide each element: one quotient for a row is faster, but too imprecise for the test case many_tables.
    moved = w - now[1] * quotient(g, tl.broadcast_to(tl.sqrt_rn(s) + step[EPS], g.shape))
    if DECAY == "decoupled":
        moved = moved - now[0] * (step[WEIGHT_DECAY] * w)
    if LIMITED:
        limit = step[MAX_NORM]
        norm = row_norm(moved)
        too_long = norm > limit
        moved = tl.where(too_long, moved * tl.div_rn(limit, tl.where(too_long, norm, 1.0)), moved)
    return moved, s


@triton.jit
def moments(g, square, m, v, now, step, BEFORE: tl.constexpr):
    """M ← β₁ m + (1 − β₁) g; v ← β₂ v + (1 − β₂) g²; m̂ / (√v̂ + ε), or with ε before bias correction."""
    m = step[BETA1] * m + step[REST1] * g
    v = step[BETA2] * v + step[REST2] * square
    c1 = now[2]
    c2 = now[3]
    if BEFORE:
        root = tl.sqrt_rn(v) + step[EPS]
        direction = quotient(m, tl.broadcast_to(root, m.shape)) * tl.div_rn(tl.sqrt_rn(c2), c1)
    else:
        root = tl.sqrt_rn(tl.div_rn(v, tl.broadcast_to(c2, v.shape))) + step[EPS]
        mean = tl.div_rn(m, tl.broadcast_to(c1, m.shape))
        direction = quotient(mean, tl.broadcast_to(root, m.shape))
    return m, v, direction


@triton.jit
def adam(w, g, m, v, width, now, step, DECAY: tl.constexpr, BEFORE: tl.constexpr, PARTIAL: tl.constexpr):
    """W ← w − γ (m̂ / (√v̂ + ε) [+ λ w]); with PARTIAL, v has one element a row, of mean(g²)."""
    g = decayed(g, w, step, DECAY)
    square = g * g
    if PARTIAL:
        square = row_mean_square(g, width)
    m, v, direction = moments(g, square, m, v, now, step, BEFORE)
    w = w - now[0] * beside(direction, w, step, DECAY)
    return w, m, v


@triton.jit
def lamb(w, g, m, v, width, now, step, DECAY: tl.constexpr, PARTIAL: tl.constexpr):
    """R = m̂ / (√v̂ + ε) [+ λ w]; w ← w − γ r ‖w‖ / ‖r‖."""
    g = decayed(g, w, step, DECAY)
    square = g * g
    if PARTIAL:
        square = row_mean_square(g, width)
    m, v, direction = moments(g, square, m, v, now, step, False)
    r = beside(direction, w, step, DECAY)
    w = w - now[0] * trust_ratio(row_norm(w), row_norm(r)) * r
    return w, m, v


@triton.jit
def lars_sgd(w, g, b, now, step):
    """A = γ η ‖w‖ / (‖g‖ + λ ‖w‖); b ← μ b + a (g + λ w); w ← w − b."""
    decay = step[WEIGHT_DECAY]
    length = row_norm(w)
    a = now[0] * trust_ratio(step[ETA] * length, row_norm(g) + decay * length)
    b = step[MOMENTUM] * b + a * (g + decay * w)
    return w - b, b


@triton.jit
def apply(
    w,
    g,
    a,
    b,
    width,
    now,
    step,
    ALGORITHM: tl.constexpr,
    STATES: tl.constexpr,
    DECAY: tl.constexpr,
    BEFORE: tl.constexpr,
    LIMITED: tl.constexpr,
):
    """Apply the rule of that name."""
    if ALGORITHM == "sgd":
        w, a = sgd(w, g, a, now, step, DECAY, STATES)
    elif ALGORITHM == "adagrad":
        w, a = adagrad(w, g, a, now, step, DECAY)
    elif ALGORITHM == "rowwise_adagrad":
        w, a = rowwise_adagrad(w, g, a, width, now, step, DECAY, LIMITED)
    elif ALGORITHM == "adam":
        w, a, b = adam(w, g, a, b, width, now, step, DECAY, BEFORE, False)
    elif ALGORITHM == "partial_rowwise_adam":
        w, a, b = adam(w, g, a, b, width, now, step, DECAY, BEFORE, True)
    elif ALGORITHM == "lamb":
        w, a, b = lamb(w, g, a, b, width, now, step, DECAY, False)
    elif ALGORITHM == "partial_rowwise_lamb":
        w, a, b = lamb(w, g, a, b, width, now, step, DECAY, True)
    else:
        tl.static_assert(ALGORITHM == "lars_sgd")
        w, a = lars_sgd(w, g, a, now, step)
    return w, a, b
