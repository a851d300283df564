"""Compare two commits: measure their builds alternately, in rounds, and compute the ratio of the times."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keyedopt.benchmarks import ab_round
from keyedopt.benchmarks.ab_round import Key, Measured, Request
from keyedopt.benchmarks.commit_builds import Progress, no_progress
from keyedopt.benchmarks.timing import student


@dataclass(frozen=True)
class Ratio:
    """How many times as long the second commit takes.

    Args:
        workload, task: the names of the comparison.
        seconds: the median over the rounds, of each commit; None if a commit cannot do the task.
        value, low, high: the ratio, and its 95 % confidence interval (Student's t over the rounds).
        error: the difference of their results, see `timing.relative_error`.
        why: the reason if there is no ratio.
    """

    workload: str
    task: str
    seconds: tuple[float, float] | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    error: float | None = None
    why: str = ""


def measure(
    request: Request, keys: Sequence[Key], rounds: int, progress: Progress = no_progress
) -> list[Ratio]:
    """Measure both commits in rounds of fresh processes; a comparison that fails is not repeated."""
    found: dict[Key, list[Measured]] = {key: [] for key in keys}
    total = rounds * len(keys)
    for number in range(rounds):
        able = [key for key in keys if not any(one.why for one in found[key])]

        def report(key: Key, number: int = number) -> None:
            progress(f"round {number + 1}: {' '.join(key)}", number * len(keys) + keys.index(key), total)

        for one in ab_round.measure(request, able, compare_results=True, progress=report):
            found[one.key].append(one)
    return [ratio_of(key, found[key]) for key in keys]


def ratio_of(key: Key, rounds: Sequence[Measured]) -> Ratio:
    """Return the ratio of one comparison over its rounds."""
    why = next((one.why for one in rounds if one.why), "")
    pairs = [one.seconds for one in rounds if one.seconds is not None]
    if why or not pairs:
        return Ratio(*key, why=why)
    logs = np.log([second / first for first, second in pairs])
    reach = 0.0
    if len(logs) > 1:
        reach = student(0.975, len(logs) - 1) * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    middle = float(np.mean(logs))
    first, second = (float(np.median([pair[side] for pair in pairs])) for side in (0, 1))
    value, low, high = (math.exp(middle + part) for part in (0.0, -reach, reach))
    return Ratio(*key, (first, second), value, low, high, rounds[-1].error)
