"""The timing core: run two jobs alternately on one clock, and compute the ratio of their times.

A machine speeds up and slows down during a measurement. The two jobs therefore run in pairs whose order
alternates, and times are compared pair by pair. Comparing a job with itself gives the noise floor.

`keyedopt bench`, the asv suites and the pytest-benchmark suites all take their times from `once`.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


def nothing() -> None:
    """Do nothing; the default of `Job.prepare`."""


#: The shortest time that is reported, so that a ratio is finite even if `Job.less` took longer than the run.
RESOLUTION = 1e-9


@dataclass(frozen=True)
class Job:
    """A piece of work that can be timed repeatedly.

    Args:
        run: the timed call.
        results: returns copies of the tensors that `run` changes, by name, to compare with other jobs.
        prepare: an untimed call before each run, for example to restore gradients that a run consumes.
        less: a call that is timed before each run; its time is subtracted from the run's.
    """

    run: Callable[[], object]
    results: Callable[[], dict[str, Tensor]]
    prepare: Callable[[], object] = nothing
    less: Callable[[], object] | None = None


class Clock(Protocol):
    """Measures the duration of a call; tests pass a fake clock."""

    def now(self) -> float:
        """Return seconds since a fixed moment, for budgets."""

    def time(self, run: Callable[[], object]) -> float:
        """Return the seconds that a call takes."""


class CpuClock:
    """The monotonic clock of the machine."""

    def now(self) -> float:
        """Return seconds since a fixed moment."""
        return time.perf_counter()

    def time(self, run: Callable[[], object]) -> float:
        """Return the seconds that a call takes."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


class ProcessorClock:
    """The CPU time of this process, over all threads; excludes other processes and waiting."""

    def now(self) -> float:
        """Return the CPU seconds of this process."""
        return time.process_time()

    def time(self, run: Callable[[], object]) -> float:
        """Return the CPU seconds that a call takes, summed over all threads."""
        start = time.process_time()
        run()
        return time.process_time() - start


class CudaClock(CpuClock):
    """CUDA events on the current stream, from an idle device until all streams are done. Synchronizes."""

    def time(self, run: Callable[[], object]) -> float:
        """Return the seconds from an event before the call until all streams have finished its work."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        then = time.perf_counter()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 + time.perf_counter() - then


class AcceleratorClock(CpuClock):
    """Time from an idle accelerator until it has finished all work. Synchronizes."""

    def time(self, run: Callable[[], object]) -> float:
        """Return the seconds from the call until the accelerator is idle."""
        torch.accelerator.synchronize()
        start = time.perf_counter()
        run()
        torch.accelerator.synchronize()
        return time.perf_counter() - start


def clock_of(device: str) -> Clock:
    """Return `CudaClock` for a CUDA device, `CpuClock` for the CPU, else `AcceleratorClock`."""
    clocks = {"cuda": CudaClock, "cpu": CpuClock}
    return clocks.get(torch.device(device).type, AcceleratorClock)()


@dataclass(frozen=True)
class Budget:
    """How long one comparison may take.

    Args:
        seconds: for all pairs of a comparison, including `Job.prepare`.
        warmup: seconds to warm up each job before the comparison.
        least, most: bounds of the number of pairs.
        patience: after `patience * seconds`, three pairs are enough.
    """

    seconds: float = 1.5
    warmup: float = 0.3
    least: int = 7
    most: int = 400
    patience: float = 4.0

    def enough(self, pairs: int, elapsed: float) -> bool:
        """Return whether to stop."""
        if pairs >= self.most:
            return True
        needed = self.least if elapsed < self.patience * self.seconds else 3
        return elapsed >= self.seconds and pairs >= needed


def after(prepared: Callable[[], object], job: Job) -> Job:
    """Return a job that also calls `prepared`, untimed, before each run; for example to flush caches."""

    def prepare() -> None:
        job.prepare()
        prepared()

    return replace(job, prepare=prepare)


def warm_up(clock: Clock, job: Job, seconds: float) -> None:
    """Run a job for some seconds and discard the times."""
    end = clock.now() + seconds
    while clock.now() < end:
        once(clock, job)


def measure(clock: Clock, a: Job, b: Job, budget: Budget) -> tuple[list[float], list[float]]:
    """Return the seconds of each run of two warm jobs, pair by pair; `a` and `b` may be the same job."""
    times: tuple[list[float], list[float]] = ([], [])
    begin = clock.now()
    while not budget.enough(len(times[0]), clock.now() - begin):
        order = (0, 1) if len(times[0]) % 2 == 0 else (1, 0)
        for index in order:
            times[index].append(once(clock, (a, b)[index]))
    return times


def samples(clock: Clock, job: Job, budget: Budget) -> list[float]:
    """Warm a job up, and return the seconds of each of its runs."""
    warm_up(clock, job, budget.warmup)
    first, second = measure(clock, job, job, budget)
    return first + second


def once(clock: Clock, job: Job) -> float:
    """Prepare a job, run it once, and return its seconds."""
    job.prepare()
    less = clock.time(job.less) if job.less else 0.0
    return max(clock.time(job.run) - less, RESOLUTION)


@dataclass(frozen=True)
class Ratio:
    """How many times as long the second job takes, with a 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def uncertainty(self) -> float:
        """The largest distance of the interval from 1; for a job against itself, the noise floor."""
        return max(abs(self.low - 1), abs(self.high - 1))

    def differs(self, noise: float) -> bool:
        """Return whether the whole interval lies outside the noise floor, on one side of 1."""
        return self.low > 1 + noise or self.high < 1 / (1 + noise)


def ratio(a: Sequence[float], b: Sequence[float], resamples: int = 2000) -> Ratio:
    """Return the median of b / a over the pairs, with the interval of a bootstrap over pairs.

    >>> ratio([1.0, 1.1, 0.9, 1.0], [2.0, 2.2, 1.8, 2.0])
    Ratio(value=2.0, low=2.0, high=2.0)
    """
    logs = np.log(np.asarray(b, dtype=np.float64)) - np.log(np.asarray(a, dtype=np.float64))
    chosen = np.random.default_rng(0).integers(len(logs), size=(resamples, len(logs)))
    low, high = np.quantile(np.median(logs[chosen], axis=1), [0.025, 0.975])
    return Ratio(*(round(float(np.exp(part)), 9) for part in (np.median(logs), low, high)))


def student(quantile: float, freedom: int) -> float:
    """Return a quantile of Student's t distribution, by bisection of `tail`.

    >>> round(student(0.975, 10), 3), round(student(0.999, 4), 2)
    (2.228, 7.17)
    """
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > 1 - quantile else (low, middle)
    return low


def tail(t: float, freedom: int) -> float:
    """Return the probability that Student's t exceeds `t`, by finite sums (Abramowitz and Stegun, 26.7).

    >>> round(tail(2.228, 10), 4), round(tail(-2.228, 10), 4), round(tail(12.706, 1), 4)
    (0.025, 0.975, 0.025)
    """
    angle = math.atan2(abs(t), math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for step in range((freedom - odd) // 2):
        total += term
        term *= cosine**2 * (2 * step + 1 + odd) / (2 * step + 2 + odd)
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    upper = max(0.0, (1 - inside) / 2)
    return upper if t >= 0 else 1 - upper


def quantiles(times: Sequence[float]) -> dict[str, float]:
    """Return the median, the 10th and the 90th percentile of some times.

    >>> quantiles([3.0, 1.0, 2.0])["median"]
    2.0
    """
    low, median, high = np.quantile(np.asarray(times, dtype=np.float64), [0.1, 0.5, 0.9])
    return {"p10": float(low), "median": float(median), "p90": float(high)}


def result_error(
    ours: tuple[dict[str, Tensor], dict[str, Tensor]], theirs: tuple[dict[str, Tensor], dict[str, Tensor]]
) -> float:
    """Return `relative_error` of two jobs, each given as (before, after); inf if they start differently."""
    before, other = ours[0], theirs[0]
    same_start = before.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in before.items()
    )
    return relative_error(before, ours[1], theirs[1]) if same_start else math.inf


def relative_error(before: dict[str, Tensor], ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest ‖ours - theirs‖ / ‖theirs - before‖ over the tensors of two jobs.

    Returns inf if names or shapes differ, or if a result is NaN.
    """
    if before.keys() != ours.keys() or before.keys() != theirs.keys():
        return float("inf")
    worst = 0.0
    for name, first in before.items():
        if not first.shape == ours[name].shape == theirs[name].shape:
            return float("inf")
        apart = (ours[name].double() - theirs[name].double()).norm()
        moved = (theirs[name].double() - first.double()).norm()
        error = float(apart / moved) if moved else float("inf" if apart else 0)
        worst = max(worst, error if error == error else float("inf"))
    return worst


class Bandwidth(NamedTuple):
    """Bytes that are read and written per second: by a copy, and by the faster of both methods."""

    copy: float
    best: float


def memory_bandwidth(clock: Clock, device: str, size: int = 1 << 28, seconds: float = 0.2) -> Bandwidth:
    """Return the median memory bandwidth of a copy and of an update in place, both of `size` bytes.

    A copy is slower on most CPUs: they first read the lines they are about to write, which is not counted.
    """
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    ways = (
        Job(run=lambda: target.copy_(source), results=dict),
        Job(run=lambda: target.mul_(1.0), results=dict),
    )
    for way in ways:
        warm_up(clock, way, seconds / 4)
    both = measure(clock, *ways, Budget(seconds=seconds, least=5))
    copied, changed = (2 * size / quantiles(times)["median"] for times in both)
    return Bandwidth(copied, max(copied, changed))
