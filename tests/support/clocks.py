"""Clocks of the tests of benchmarks, on which no real time passes."""

import numpy as np

from keyedopt.benchmarks import timing
from keyedopt.benchmarks.timing import Budget, Job

BRIEF = Budget(seconds=0.0, warmup=0.0, least=3, most=3)


class FakeClock:
    """A clock on which a job takes as long as it says, times a noise of the machine."""

    def __init__(self, noise=0.0, seed=0):
        self.at, self.noise, self.random = 0.0, noise, np.random.default_rng(seed)
        self.timed = []

    def now(self):
        return self.at

    def time(self, run):
        self.timed.append(run)
        took = run() * float(np.exp(self.random.normal(0, self.noise)))
        self.at += took
        return took


class UnitClock(FakeClock):
    """A clock on which everything takes a second."""

    def time(self, run):
        run()
        self.at += 1.0
        return 1.0


def job(seconds, prepare=timing.nothing):
    return Job(run=lambda: seconds, results=dict, prepare=prepare)
