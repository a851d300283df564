"""The gate: does the present checkout take longer than a base commit, by how much, and how surely?

Absolute times mean nothing on another day, and ratios to another library shift by some percent with the load
of the machine. The gate therefore compares two builds of the same implementation in rounds of fresh processes
(`keyedopt.benchmarks.ab_round`): y = log(checkout / base) of each round. The spread within a round is too
small, because a process keeps its placement in memory; the spread over rounds counts.

First the base is measured against itself in n rounds: z, the noise floor, whose centre is 0. A round is
sometimes off by 10 % or more, so medians are used and residuals are capped. With m rounds of the checkout and
the residuals r, which are all z and all y - d,

    d = median(y),     c = 3 · max(1.4826 · median(|r|), floor),
    s² = Σ min(r², c²) / (n + m - 1),     se = s · √(π / 2m),

and exp(d) - 1 is the slowdown. 1.4826 · median(|r|) estimates the standard deviation of normal residuals, and
√(π / 2) is the ratio of the standard errors of median and mean. s is at least `Limits.floor`. With m < 3 no
residual is capped, because nobody can say which of two rounds is off. Student's t with n + m - 1 degrees of
freedom gives the bounds.

- *worse*: the lower bound of d is above 0, at a level that is divided by the number of comparisons and by
  `LOOKS` for repeated looks, so that at most 1 of 20 runs without a change raises an alarm; and d is above
  the tolerance; and both still hold after `Limits.confirm` rounds, of which two may be off.
- *fine*: not worse, and the upper bound of d, at the level `Limits.miss`, is below `Limits.find`; after at
  least `Limits.first` rounds.
- otherwise further rounds follow, up to `Limits.most`; an undecided comparison is then *unclear*.
- *missing*: the base does the task and the checkout cannot.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from keyedopt.benchmarks import ab_round
from keyedopt.benchmarks.ab_round import Key, Measured, Request
from keyedopt.benchmarks.commit_builds import Progress, no_progress
from keyedopt.benchmarks.timing import student, tail
from keyedopt.conformance.results.errors import KeyedoptError

#: Rounds of the base against itself.
NOISE_ROUNDS = 8
#: Repeated looks at growing data are not independent: together they count as this many.
LOOKS = 3
#: The standard deviation of a normal distribution over the median of absolute values.
NORMAL = 1.4826


class GateError(KeyedoptError):
    """The gate cannot give a verdict; the message says why."""


@dataclass(frozen=True)
class Limits:
    """How large a slowdown the gate looks for, and how long.

    Args:
        find: the slowdown that must be found.
        tolerance: a smaller slowdown never raises an alarm.
        risk: the probability of an alarm anywhere in a run without a change.
        first: rounds before the first verdict.
        confirm: the number of rounds that an alarm needs.
        most: rounds after which an undecided comparison is unclear.
        miss: the probability that a comparison with a slowdown of `find` is called fine.
        floor: the smallest spread of rounds that is assumed.
        comparisons: the number of comparisons that share `risk`; by default those that are measured.
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
    """The verdict on one comparison.

    Args:
        value: the slowdown, 0.1 for 10 %.
        low, high: its bounds at the level of an alarm.
        chance: the probability of this slowdown or a larger one without a change.
        verdict: ``worse``, ``fine``, ``unclear``, ``missing``, or ``again`` while more rounds are needed.
        rounds: the number of rounds.
        why: the reason if the verdict is ``missing``.
        slowdowns: y of each round.
    """

    value: float
    low: float
    high: float
    chance: float
    verdict: str
    rounds: int
    why: str = ""
    slowdowns: tuple[float, ...] = ()


def change(noise: Sequence[float], now: Sequence[float], limits: Limits, comparisons: int) -> Change:
    """Return the verdict on the rounds so far; `noise` holds the rounds of the base against itself."""
    m = len(now)
    middle, freedom = float(np.median(now)), len(noise) + m - 1
    spread = _spread(np.append(noise, np.subtract(now, middle)), freedom, m, limits)
    error = spread * math.sqrt(math.pi / 2 / m)
    reach = student(1 - limits.risk / (comparisons * LOOKS), freedom) * error
    low, high = middle - reach, middle + reach
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
    """Return the standard deviation of rounds, with residuals capped."""
    sizes = np.abs(residuals)
    most = 3 * max(NORMAL * float(np.median(sizes)), limits.floor) if rounds >= 3 else math.inf
    return max(math.sqrt(float(np.sum(np.minimum(sizes, most) ** 2)) / freedom), limits.floor)


def judge(
    noise: Mapping[Key, Sequence[float]],
    measure: Callable[[Sequence[Key]], Iterable[Measured]],
    limits: Limits = LIMITS,
    progress: Callable[[int, int], object] = lambda rounds, undecided: None,
) -> dict[Key, Change]:
    """Measure round by round until every comparison is decided or `Limits.most` is reached.

    Args:
        noise: the rounds of the base against itself, by comparison.
        measure: measures one round of the given comparisons.
        limits: see there.
        progress: called after each round with the number of rounds and of undecided comparisons.
    """
    now: dict[Key, list[float]] = {key: [] for key in noise}
    found: dict[Key, Change] = {}
    undecided, rounds, nan = list(noise), 0, math.nan
    while undecided:
        measured = {one.key: one for one in measure(undecided)}
        rounds += 1
        for key in undecided:
            one = measured.get(key, Measured(key, None))
            if one.slowdown is None:
                found[key] = Change(nan, nan, nan, nan, "missing", len(now[key]), one.why)
            else:
                now[key].append(one.slowdown)
                found[key] = change(noise[key], now[key], limits, limits.comparisons or len(noise))
        if rounds >= limits.first:
            undecided = [key for key in undecided if found[key].verdict == "again"]
        progress(rounds, len(undecided))
    return {key: found[key] for key in noise}


def noise_floor(
    request: Request, keys: Sequence[Key], rounds: int = NOISE_ROUNDS, progress: Progress = no_progress
) -> tuple[dict[Key, list[float]], dict[Key, str]]:
    """Measure the base against itself.

    Args:
        request: the base is the first build.
        keys: the comparisons.
        rounds: their number.
        progress: called before each round.

    Returns:
        the slowdowns of each comparison, and the reason for each comparison that the base cannot do.

    Raises:
        GateError: the base can do none of the comparisons.
    """
    itself = replace(request, trees=(request.trees[0],) * 2, targets=(request.targets[0],) * 2)
    found: dict[Key, list[float]] = {key: [] for key in keys}
    left_out: dict[Key, str] = {}
    for number in range(rounds):
        if not found:
            break
        progress("base against itself", number, rounds)
        for one in ab_round.measure(itself, list(found)):
            if one.slowdown is None:
                left_out[one.key] = one.why
                del found[one.key]
            else:
                found[one.key].append(one.slowdown)
    if not found:
        raise GateError(f"nothing can be measured: {next(iter(left_out.values()), 'no comparison')}")
    return found, left_out


def run(
    request: Request,
    noise: Mapping[Key, Sequence[float]],
    limits: Limits = LIMITS,
    progress: Progress = no_progress,
) -> dict[Key, Change]:
    """Compare the second build with the first, given the noise floor of the first."""
    total = len(noise)
    progress("first round", 0, total)
    return judge(
        noise,
        lambda keys: ab_round.measure(request, keys),
        limits,
        lambda rounds, left: progress(f"rounds: {rounds}, undecided: {left}", total - left, total),
    )
