"""The gate: today's implementation against that of a baseline; what got worse, how much, how surely.

A time says nothing on another day, and a ratio to another library shifts with the load of the machine, by
some percent. So what is compared is the slowdown of each round, y = log(today / then), of two fresh processes
that run in turn, one with today's build, one with that of the baseline. Times of one process share its
placement in memory, so that the spread within a round says too little: what counts is the spread of rounds.
The baseline keeps n rounds z of its build against itself: the noise floor. They are 0 in the middle, for
certain. Now and then a round is off by a tenth or more, up or down, so medians are taken, and residuals are
cut off: with m new rounds and the residuals r, which are all z and all y - d,

    d = median(y),     c = 3 · max(1.4826 · median(|r|), floor),
    s² = Σ min(r², c²) / (n + m - 1),     se = s · √(π / 2m),

and exp(d) - 1 is how much worse it got. 1.4826 · median(|r|) is the standard deviation of normal residuals,
and √(π / 2) is how much wider medians of many of them spread than means do. s is never taken for smaller than
`Limits.floor`. Of two rounds nobody can say which one is off: with m < 3 nothing is cut off. t-quantiles with
n + m - 1 degrees of freedom give the bounds. Where there is no build, because the implementation is not ours,
y and z are log(ours / peer), and the middle of z is a guess as well: with the residuals z - median(z) and
y - median(y), and n + m - 2 degrees of freedom,

    d = median(y) - median(z),     s² = Σ min(r², c²) / (n + m - 2),     se = s · √(π/2 · (1/n + 1/m)).

- *worse*: the lower bound of d is above 0, at a level that is divided by the number of all comparisons and
  for repeated looks, so that a run without a change raises an alarm anywhere in at most 1 of 20, if its
  rounds vary as those of the baseline do; and d itself is above the tolerance; and both still hold once it
  was measured again (`Limits.confirm` rounds, of which two may be off).
- *fine*: the upper bound of d, at a level of its own, is below what has to be found, and it is not worse;
  after `Limits.first` rounds at the earliest.
- otherwise there are more rounds, up to `Limits.most`; what is undecided then is said to be *unclear*.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keyedopt.benchmarks.baseline import Baseline
from keyedopt.benchmarks.rounds import Key, Measured

#: Looks at data that grow are far from independent: all of them together count as this many.
LOOKS = 3
#: The standard deviation of normal values over the median of their sizes.
NORMAL = 1.4826


@dataclass(frozen=True)
class Limits:
    """What the gate looks for, and how long.

    Args:
        find: the change that has to be found.
        tolerance: a smaller change is never an alarm.
        risk: of an alarm anywhere in a run without a change.
        first: rounds before the first look.
        confirm: rounds that an alarm takes at least.
        most: rounds after which what is undecided stays so.
        miss: the risk that a comparison is called fine though it got worse by `find`.
        floor: the spread of rounds is never taken for smaller than this.
        comparisons: of how many the risk is; by default of those in the baseline.
    """

    find: float = 0.10
    tolerance: float = 0.04
    risk: float = 0.05
    first: int = 2
    confirm: int = 5
    most: int = 12
    miss: float = 0.003
    floor: float = 0.01
    comparisons: int | None = None


LIMITS = Limits()


@dataclass(frozen=True)
class Change:
    """What became of one comparison since the baseline.

    Args:
        value: how much more time it takes, 0.1 for a tenth.
        low, high: what holds it at the level that an alarm takes.
        chance: of seeing as much or more where nothing has changed.
        verdict: ``worse``, ``fine``, ``unclear``, ``again`` where more rounds are needed.
        rounds: how many there were.
        why: why it could not be measured.
        slowdowns: what each round gave.
    """

    value: float
    low: float
    high: float
    chance: float
    verdict: str
    rounds: int
    why: str = ""
    slowdowns: tuple[float, ...] = ()


def student(quantile: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution, by bisection of its tail.

    >>> round(student(0.975, 10), 3), round(student(0.999, 4), 2)
    (2.228, 7.17)
    """
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > 1 - quantile else (low, middle)
    return low


def tail(t: float, freedom: int) -> float:
    """Return the probability that Student's t is above `t`, by its finite sums (Abramowitz and Stegun, 26.7).

    >>> round(tail(2.228, 10), 4), round(tail(-2.228, 10), 4), round(tail(12.706, 1), 4)
    (0.025, 0.975, 0.025)
    """
    angle = math.atan2(abs(t), math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    term, total = (cosine, 0.0) if freedom % 2 else (1.0, 0.0)
    for step in range((freedom - 1 if freedom % 2 else freedom) // 2):
        total += term
        odd = freedom % 2
        term *= cosine**2 * (2 * step + 1 + odd) / (2 * step + 2 + odd)
    inside = 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total
    upper = max(0.0, (1 - inside) / 2)
    return upper if t >= 0 else 1 - upper


def change(
    before: Sequence[float], now: Sequence[float], limits: Limits, comparisons: int, itself: bool
) -> Change:
    """Judge the slowdowns of the rounds so far; `itself`: those before are of a build against itself."""
    n, m = len(before), len(now)
    centre = 0.0 if itself else float(np.median(before))
    middle = float(np.median(now))
    freedom = n + m - (1 if itself else 2)
    spread = _spread(np.append(np.subtract(before, centre), np.subtract(now, middle)), freedom, m, limits)
    error = spread * math.sqrt(math.pi / 2 * (1 / m + (0 if itself else 1 / n)))
    middle -= centre
    level = limits.risk / (comparisons * LOOKS)
    low = middle - student(1 - level, freedom) * error
    high = middle + student(1 - level, freedom) * error
    surely_less = middle + student(1 - limits.miss, freedom) * error < math.log1p(limits.find)
    alarming = low > 0 and middle > math.log1p(limits.tolerance)
    if alarming and m >= min(limits.confirm, limits.most):
        verdict = "worse"
    elif not alarming and surely_less:
        verdict = "fine"
    else:
        verdict = "again" if m < limits.most else "unclear"
    value, below, above = (math.expm1(part) for part in (middle, low, high))
    return Change(value, below, above, tail(middle / error, freedom), verdict, m, slowdowns=tuple(now))


def _spread(residuals: NDArray[np.float64], freedom: int, rounds: int, limits: Limits) -> float:
    """Return the standard deviation of rounds, of which some are off."""
    sizes = np.abs(residuals)
    most = 3 * max(NORMAL * float(np.median(sizes)), limits.floor) if rounds >= 3 else math.inf
    return max(math.sqrt(float(np.sum(np.minimum(sizes, most) ** 2)) / freedom), limits.floor)


def judge(
    baseline: Baseline,
    measure: Callable[[Sequence[Key]], Sequence[Measured]],
    limits: Limits = LIMITS,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> dict[Key, Change]:
    """Measure, round by round, until everything is decided or there were enough rounds.

    Args:
        baseline: what is compared with.
        measure: makes a round of the comparisons it is given.
        limits: what is looked for.
        progress: called after each round with how many there were and how many comparisons are open.
    """
    before, itself = baseline.slowdowns(), baseline.build is not None
    now: dict[Key, list[float]] = {key: [] for key in before}
    found: dict[Key, Change] = {}
    open_ones = list(before)
    rounds = 0
    while open_ones:
        measured = {one.key: one for one in measure(open_ones)}
        rounds += 1
        for key in open_ones:
            slowdown, why = (measured[key].slowdown, measured[key].why) if key in measured else (None, "")
            if slowdown is None:
                found[key] = Change(math.nan, math.nan, math.nan, math.nan, "missing", len(now[key]), why)
            else:
                now[key].append(slowdown)
                count = limits.comparisons or len(before)
                found[key] = change(before[key], now[key], limits, count, itself)
        if rounds >= limits.first:
            open_ones = [key for key in open_ones if found[key].verdict == "again"]
        progress(rounds, len(open_ones))
    return {key: found[key] for key in before}
