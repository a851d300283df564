"""The gate: ratios of one run against a stored baseline of ratios; what got worse, by how much, how surely.

A time says nothing on another day, so what is compared is the slowdown y = log(ours / peer) of each round, a
round being a process of its own in which ours and the peer run in turn: times of one process share its
placement in memory and the state of the machine, so that the spread within it says too little. The baseline
keeps the slowdowns of its rounds. With n of them, m new ones, their means and the spread s of both together,

    d = mean(new) - mean(baseline),     se = s · √(1/n + 1/m),

and exp(d) - 1 is how much worse it got; t-quantiles with n + m - 2 degrees of freedom give the bounds.

- *worse*: the lower bound of d is above 0, at a level that is divided by the number of all comparisons and
  for repeated looks, so that a run without a change raises an alarm anywhere in at most 1 of 20, if its
  rounds vary as those of the baseline do; and d itself is above the tolerance; and both still hold once it
  was measured again (`Limits.confirm` rounds).
- *fine*: the upper bound of d, at a level of its own, is below what has to be found.
- otherwise there are more rounds, up to `Limits.most`; what is undecided then is said to be *unclear*.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keyedopt.benchmarks.baseline import Baseline, Key

#: Looks at data that grow are far from independent: all of them together count as this many.
LOOKS = 3


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
    confirm: int = 6
    most: int = 16
    miss: float = 0.003
    floor: float = 0.005
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
    """

    value: float
    low: float
    high: float
    chance: float
    verdict: str
    rounds: int


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
    before: Sequence[float], now: Sequence[float], limits: Limits, comparisons: int, noise: float = 0.0
) -> Change:
    """Judge the slowdowns of the rounds so far; the noise floor is the least spread that they can have."""
    n, m = len(before), len(now)
    freedom = n + m - 2
    mean = float(np.mean(now) - np.mean(before))
    squares = float(np.var(before) * n + np.var(now) * m)
    error = max(math.sqrt(squares / freedom), noise, limits.floor) * math.sqrt(1 / n + 1 / m)
    level = limits.risk / (comparisons * LOOKS)
    low = mean - student(1 - level, freedom) * error
    high = mean + student(1 - level, freedom) * error
    surely_less = mean + student(1 - limits.miss, freedom) * error < math.log1p(limits.find)
    alarming = low > 0 and mean > math.log1p(limits.tolerance)
    if alarming and m >= min(limits.confirm, limits.most):
        verdict = "worse"
    elif not alarming and surely_less:
        verdict = "fine"
    else:
        verdict = "again" if m < limits.most else "unclear"
    value, below, above = (math.expm1(part) for part in (mean, low, high))
    return Change(value, below, above, tail(mean / error, freedom), verdict, m)


def judge(
    baseline: Baseline,
    measure: Callable[[Sequence[Key]], Mapping[Key, float]],
    limits: Limits = LIMITS,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> dict[Key, Change]:
    """Measure, round by round, until everything is decided or there were enough rounds.

    Args:
        baseline: what is compared with.
        measure: makes a round of the comparisons it is given, and returns their slowdowns; one that is
            missing could not be measured.
        limits: what is looked for.
        progress: called after each round with how many there were and how many comparisons are open.
    """
    before, noise = baseline.slowdowns(), baseline.noise()
    now: dict[Key, list[float]] = {key: [] for key in before}
    found: dict[Key, Change] = {}
    open_ones = list(before)
    rounds = 0
    while open_ones:
        values = measure(open_ones)
        rounds += 1
        for key in open_ones:
            if key in values:
                now[key].append(values[key])
        if rounds >= limits.first:
            for key in list(open_ones):
                if not now[key]:
                    found[key] = Change(math.nan, math.nan, math.nan, math.nan, "missing", 0)
                else:
                    found[key] = change(
                        before[key], now[key], limits, limits.comparisons or len(before), noise[key]
                    )
            open_ones = [key for key in open_ones if found[key].verdict == "again" and rounds < limits.most]
        progress(rounds, len(open_ones))
    return {key: found[key] for key in before}
