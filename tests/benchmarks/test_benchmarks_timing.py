"""What is timed, and the timing core, on clocks of their own; no real time is asserted."""

import pytest
import torch
from clocks import BRIEF, FakeClock, UnitClock, job

from keyedopt.benchmarks import timing
from keyedopt.benchmarks.tasks import TASKS
from keyedopt.benchmarks.tasks.tables import training_job
from keyedopt.benchmarks.timing import Budget, Job, Ratio

# --- what is timed -------------------------------------------------------------------------------


def test_what_is_taken_off_is_timed_before_each_run_and_leaves_a_time():
    clock, said = FakeClock(), []
    work = Job(lambda: said.append("run") or 3.0, dict, lambda: said.append("prepare"), lambda: 1.0)
    assert timing.measure(clock, work, job(4.0), BRIEF) == ([2.0] * 3, [4.0] * 3)
    assert said == ["prepare", "run"] * 3
    assert timing.once(clock, Job(lambda: 1.0, dict, less=lambda: 5.0)) == timing.RESOLUTION
    assert timing.after(timing.nothing, work).less is work.less


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_gpu_a_backward_is_both_passes_without_a_forward_that_none_follows(device):
    said = []

    def forward():
        said.append(("forward", torch.is_grad_enabled()))
        return "outputs"

    made = training_job(TASKS["backward-sgd"], forward, lambda given: said.append(given), dict, device)
    clock = UnitClock()
    timing.once(clock, made)
    if device == "cpu":
        assert said == [("forward", True), "outputs"]
        assert clock.at == 1.0, "the forward is prepared"
    else:
        assert said == [("forward", False), ("forward", True), "outputs"]
        assert clock.at == 2.0


def test_a_time_on_a_gpu_ends_when_all_streams_are_done(monkeypatch):
    now, left = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 1e3 * (end.at - self.at)

    def synchronize():
        now[0] += sum(left)
        left.clear()

    def run():
        now[0] += 2.0
        left.append(5.0)  # in a stream of its own

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    left.append(100.0)  # of before
    assert timing.CudaClock().time(run) == 7.0


# --- the timing core ------------------------------------------------------------------------------


def test_pairs_alternate_and_what_is_prepared_is_not_timed():
    clock, order = FakeClock(), []
    a, b = (job(took, lambda took=took: order.append(took)) for took in (1.0, 2.0))
    times = timing.measure(clock, a, b, Budget(seconds=12, least=1))
    assert times == ([1.0] * 4, [2.0] * 4)
    assert order == [1, 2, 2, 1, 1, 2, 2, 1]
    assert clock.timed == [{1: a.run, 2: b.run}[took] for took in order]


@pytest.mark.parametrize(
    ("took", "budget", "pairs"),
    [
        (0.5, Budget(seconds=10, least=2), 10),
        (0.5, Budget(seconds=10, least=30, patience=9), 30),
        (0.5, Budget(seconds=10, most=4), 4),
        (50.0, Budget(seconds=10, least=7, patience=4), 3),
    ],
    ids=["time", "least", "most", "patience"],
)
def test_the_budget_is_kept(took, budget, pairs):
    times = timing.measure(FakeClock(), job(took), job(took), budget)
    assert [len(part) for part in times] == [pairs, pairs]


def test_warming_up_takes_time():
    clock = FakeClock()
    timing.warm_up(clock, job(1.0), 2.5)
    assert clock.at == 3.0


def test_a_ratio_is_taken_pair_by_pair():
    drift = [1.0, 10.0, 100.0, 2.0, 5.0]  # a machine that gets slower hurts both alike
    assert timing.ratio(drift, [3 * t for t in drift]) == Ratio(3.0, 3.0, 3.0)


def verdicts(factor, trials=20):
    """Compare a job with one that is slower by a factor, on noisy machines, each against its noise floor."""
    budget = Budget(seconds=60.0, most=60)
    for seed in range(trials):
        clock = FakeClock(noise=0.08, seed=seed)
        noise = timing.ratio(*timing.measure(clock, job(1.0), job(1.0), budget)).uncertainty
        yield timing.ratio(*timing.measure(clock, job(1.0), job(factor), budget)).differs(noise)


def test_a_planted_difference_is_found():
    assert sum(verdicts(1.2)) >= 19


def test_nothing_is_found_where_there_is_nothing():
    assert sum(verdicts(1.0)) <= 1


def test_the_interval_holds_the_true_ratio():
    held = 0
    for seed in range(40):
        times = timing.measure(FakeClock(0.1, seed), job(1.0), job(2.0), Budget(seconds=1000, most=50))
        found = timing.ratio(*times)
        held += found.low <= 2.0 <= found.high
    assert held >= 35


def test_bandwidth_counts_what_is_read_and_what_is_written():
    assert timing.memory_bandwidth(UnitClock(), "cpu", size=1000) == (2000, 2000)


@pytest.mark.parametrize(("slow", "copy", "best"), [("copy_", 1000, 2000), ("mul_", 2000, 2000)])
def test_bandwidth_is_that_of_a_copy_and_of_what_is_fastest(slow, copy, best):
    class Clock(UnitClock):
        """One to which one way takes twice as long."""

        def time(self, run):
            once = super().time(run)
            return 2 * once if slow in run.__code__.co_names else once

    assert timing.memory_bandwidth(Clock(), "cpu", size=1000) == (copy, best)


@pytest.mark.parametrize(
    ("theirs", "error"),
    [([1.0, 3.0], 0.0), ([1.0, 3.5], 0.2), ([1.0, float("nan")], float("inf")), ([1.0], float("inf"))],
)
def test_results_are_compared_by_what_has_changed(theirs, error):
    before, ours = {"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([1.0, 3.0])}
    assert timing.relative_error(before, ours, {"w": torch.tensor(theirs)}) == error
    assert timing.relative_error(before, ours, {"v": torch.tensor(theirs)}) == float("inf")
