"""The timing core: two jobs in turn on one clock, and what may be said of their ratio.

A machine gets faster and slower while it measures, so times of two jobs are taken in turn, in pairs whose
order alternates, and compared pair by pair. A job against itself shows what such a comparison says where
there is nothing to find: the noise floor.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


def nothing() -> None:
    """Do nothing: what a job prepares where there is nothing to prepare."""


#: The seconds of a run, at least: a ratio can be formed even if what is taken off happened to take longer.
RESOLUTION = 1e-9


@dataclass(frozen=True)
class Job:
    """Something that is timed.

    Args:
        run: what is timed.
        results: what it has changed, as copies by name, to be compared with those of other jobs.
        prepare: what has to be done before each run and is not timed, such as restoring what a run uses up.
        less: what is timed before each run, and taken off its time.
    """

    run: Callable[[], object]
    results: Callable[[], dict[str, Tensor]]
    prepare: Callable[[], object] = nothing
    less: Callable[[], object] | None = None


class Clock(Protocol):
    """Takes times; a test gives one of its own."""

    def now(self) -> float:
        """Return the seconds since some moment, for budgets."""

    def time(self, run: Callable[[], object]) -> float:
        """Return the seconds that a call takes."""


class CpuClock:
    """The monotonic clock of the machine."""

    def now(self) -> float:
        """Return the seconds since some moment."""
        return time.perf_counter()

    def time(self, run: Callable[[], object]) -> float:
        """Return the seconds that a call takes."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


class ProcessorClock:
    """The processor time of this process: what others do meanwhile does not count, nor does waiting."""

    def now(self) -> float:
        """Return the seconds that this process has computed."""
        return time.process_time()

    def time(self, run: Callable[[], object]) -> float:
        """Return the seconds of computing, on all threads together, that a call takes."""
        start = time.process_time()
        run()
        return time.process_time() - start


class CudaClock(CpuClock):
    """Events on the current stream: what the device takes, from when it is idle until all of it is done."""

    def time(self, run: Callable[[], object]) -> float:
        """Return the seconds from an event before the call to one after it, and on until all is done."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        then = time.perf_counter()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 + time.perf_counter() - then


def clock_of(device: str) -> Clock:
    """Return the clock for a device."""
    return CudaClock() if torch.device(device).type == "cuda" else CpuClock()


@dataclass(frozen=True)
class Budget:
    """How long to measure.

    Args:
        seconds: for all pairs of a comparison, preparation included.
        warmup: for each job, before it is compared.
        least, most: bounds of the number of pairs.
        patience: after this many times `seconds`, three pairs have to do.
    """

    seconds: float = 1.5
    warmup: float = 0.3
    least: int = 7
    most: int = 400
    patience: float = 4.0

    def enough(self, pairs: int, elapsed: float) -> bool:
        """Whether to stop."""
        if pairs >= self.most:
            return True
        needed = self.least if elapsed < self.patience * self.seconds else 3
        return elapsed >= self.seconds and pairs >= needed


def after(prepared: Callable[[], object], job: Job) -> Job:
    """Return a job before each run of which something else is done, untimed: emptying caches, say."""

    def prepare() -> None:
        job.prepare()
        prepared()

    return replace(job, prepare=prepare)


def warm_up(clock: Clock, job: Job, seconds: float) -> None:
    """Run a job for some time, without keeping the times."""
    end = clock.now() + seconds
    while clock.now() < end:
        once(clock, job)


def measure(clock: Clock, a: Job, b: Job, budget: Budget) -> tuple[list[float], list[float]]:
    """Return the seconds of two jobs that are warm, pair by pair; a job may be compared with itself."""
    times: tuple[list[float], list[float]] = ([], [])
    begin = clock.now()
    while not budget.enough(len(times[0]), clock.now() - begin):
        order = (0, 1) if len(times[0]) % 2 == 0 else (1, 0)
        for index in order:
            times[index].append(once(clock, (a, b)[index]))
    return times


def once(clock: Clock, job: Job) -> float:
    """Prepare a job and run it, once; return the seconds that count."""
    job.prepare()
    less = clock.time(job.less) if job.less else 0.0
    return max(clock.time(job.run) - less, RESOLUTION)


@dataclass(frozen=True)
class Ratio:
    """How many times as long the second job takes, with an interval that holds it at 95 %."""

    value: float
    low: float
    high: float

    @property
    def uncertainty(self) -> float:
        """How far from 1 the interval reaches; of a job against itself, the noise floor."""
        return max(abs(self.low - 1), abs(self.high - 1))

    def differs(self, noise: float) -> bool:
        """Whether the whole interval is beyond the noise floor, on one side of 1."""
        return self.low > 1 + noise or self.high < 1 / (1 + noise)


def ratio(a: Sequence[float], b: Sequence[float], resamples: int = 2000) -> Ratio:
    """Return the median of b / a over the pairs; the interval is the bootstrap's, with pairs drawn anew.

    >>> ratio([1.0, 1.1, 0.9, 1.0], [2.0, 2.2, 1.8, 2.0])
    Ratio(value=2.0, low=2.0, high=2.0)
    """
    logs = np.log(np.asarray(b, dtype=np.float64)) - np.log(np.asarray(a, dtype=np.float64))
    chosen = np.random.default_rng(0).integers(len(logs), size=(resamples, len(logs)))
    low, high = np.quantile(np.median(logs[chosen], axis=1), [0.025, 0.975])
    return Ratio(*(round(float(np.exp(part)), 9) for part in (np.median(logs), low, high)))


def quantiles(times: Sequence[float]) -> dict[str, float]:
    """Return the median of some times, and what a tenth and nine tenths of them are below.

    >>> quantiles([3.0, 1.0, 2.0])["median"]
    2.0
    """
    low, median, high = np.quantile(np.asarray(times, dtype=np.float64), [0.1, 0.5, 0.9])
    return {"p10": float(low), "median": float(median), "p90": float(high)}


def relative_error(before: dict[str, Tensor], ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return how far two jobs that began alike are apart: ‖ours - theirs‖ / ‖theirs - before‖, the worst."""
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
    """Bytes of memory that are read and written a second: by a copy, and by what is fastest."""

    copy: float
    best: float


def memory_bandwidth(clock: Clock, device: str, size: int = 1 << 28, seconds: float = 0.2) -> Bandwidth:
    """Return the bytes a second that are read and written at the median, in two ways.

    A copy of `size` bytes, before which most processors read what they are about to write, uncounted; and a
    change of as many in place.
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
