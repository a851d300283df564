"""Workloads, the timing core on clocks of its own, and what a run of it says; no real time is asserted."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from keyedopt.benchmarks import compare, timing
from keyedopt.benchmarks.peers import OWN_WAY
from keyedopt.benchmarks.tasks import TASKS, NotOffered, make
from keyedopt.benchmarks.tasks.tables import training_job
from keyedopt.benchmarks.timing import Budget, Job, Ratio
from keyedopt.benchmarks.workloads import STATE, WORKLOADS, Dense, Lookups, SparseGradients, _unique, _values
from keyedopt.conformance.implementation import TargetError, find

TINY = Lookups("tiny", "for tests", tables=2, rows=50, dim=4, batch=6, pooling=3)
FEW = Dense("few", "for tests", ((4, 3), (3,)), 2)
SPARSE = SparseGradients("few-rows", "for tests", tables=2, rows=30, dim=4, lookups=40)
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


# --- workloads ------------------------------------------------------------------------------------


def test_names_are_those_of_the_tables():
    for known in (WORKLOADS, TASKS):
        assert all(name == item.name and item.about for name, item in known.items())


@pytest.mark.parametrize("indices", ["zipf", "uniform", "same", "distinct"])
def test_lookups_are_deterministic_and_in_range(indices):
    work = dataclasses.replace(TINY, indices=indices)
    first = work.values()
    _values.cache_clear()
    assert all(map(torch.equal, first, work.values()))
    assert all(map(torch.equal, work.gradients(), work.gradients()))
    for values in first:
        assert values.shape == (18,)
        assert values.dtype == torch.int64
        assert values.min() >= 0
        assert values.max() < 50
    distinct = {"same": [1, 1], "distinct": [18, 18]}
    _unique.cache_clear()
    found = [len(rows) for rows in work.unique()]
    assert found == distinct.get(indices, found)
    assert work.offsets().tolist() == [0, 3, 6, 9, 12, 15, 18]


def test_zipf_is_skewed_as_it_says():
    work = Lookups("z", "", tables=1, rows=100, dim=1, batch=20_000, pooling=1)
    counts = work.values()[0].bincount(minlength=100).sort(descending=True).values.double()
    assert counts[0] / counts[7] == pytest.approx(8**1.05, rel=0.15)


def test_work_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="indices must be"):
        dataclasses.replace(TINY, indices="nope")
    with pytest.raises(ValueError, match="distinct"):
        dataclasses.replace(TINY, indices="distinct", pooling=20)


def test_bytes_follow_from_the_work():
    work = dataclasses.replace(TINY, indices="distinct")  # 2 · 18 rows of 4 numbers, 12 bags
    indices, rows, bags = 8 * 36, 4 * 36 * 4, 4 * 12 * 4
    assert work.forward_bytes() == indices + rows + bags
    assert work.backward_bytes("sgd") == indices + bags + 2 * rows
    assert work.backward_bytes("rowwise_adagrad") == indices + bags + 2 * rows + 2 * 4 * 36
    assert work.backward_bytes("adagrad") == indices + bags + 4 * rows
    assert work.backward_bytes("adam") == indices + bags + 6 * rows
    assert FEW.numbers() == 30
    assert FEW.clip_adam_bytes() == 36 * 30
    assert FEW.state_bytes() == 2 * 4 * (30 + 4)
    even = dataclasses.replace(SPARSE, rows=40, indices="distinct")
    assert even.sparse_adam_bytes() == 80 * 8 + 80 * 16 + 80 * 16 * 6


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
    assert timing.copy_bandwidth(UnitClock(), "cpu", size=1000) == 2000


@pytest.mark.parametrize(
    ("theirs", "error"),
    [([1.0, 3.0], 0.0), ([1.0, 3.5], 0.2), ([1.0, float("nan")], float("inf")), ([1.0], float("inf"))],
)
def test_results_are_compared_by_what_has_changed(theirs, error):
    before, ours = {"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([1.0, 3.0])}
    assert timing.relative_error(before, ours, {"w": torch.tensor(theirs)}) == error
    assert timing.relative_error(before, ours, {"v": torch.tensor(theirs)}) == float("inf")


# --- tasks and peers ------------------------------------------------------------------------------


def run(name, task, work):
    about = find(name)
    made = compare.start(
        lambda: OWN_WAY.get(name, make)(about.surface(), task, work, "cpu"), UnitClock(), warmup=0.0
    )
    again = {key: value.clone() for key, value in made.before.items()}
    assert any(not torch.equal(value, made.after[key]) for key, value in again.items())
    return made


@pytest.mark.parametrize("optimizer", STATE)
def test_our_tables_do_the_same_work(optimizer):
    task = TASKS[f"train-{optimizer}"]
    apart = TASKS[f"backward-{optimizer}"]
    ours = run("keyedopt.fused", task, TINY)
    assert compare.error_between(ours, run("reference", task, TINY)) < 1e-5
    assert compare.error_between(ours, run("reference", apart, TINY)) < 1e-5


@pytest.mark.parametrize(
    ("task", "work", "peer"),
    [
        ("train-sgd", TINY, "torch"),
        ("train-adagrad", TINY, "torch"),
        ("train-adam", TINY, "torch"),
        ("backward-adam", TINY, "torch"),
        ("train-sgd", TINY, "fbgemm"),
        ("train-adagrad", TINY, "fbgemm"),
        ("train-rowwise_adagrad", TINY, "fbgemm"),
        ("backward-rowwise_adagrad", TINY, "fbgemm"),
        ("train-sgd", TINY, "torchrec"),
        ("train-adagrad", TINY, "torchrec"),
        ("train-rowwise_adagrad", TINY, "torchrec"),
        ("backward-rowwise_adagrad", TINY, "torchrec"),
        ("forward", TINY, "torchrec"),
        ("train_warmup-adagrad", TINY, "torchrec"),
        ("state_dict-tables_adagrad", TINY, "torchrec"),
        ("load-tables_rowwise_adagrad", TINY, "torchrec"),
        ("step_clipped-norm-rowwise_adagrad", FEW, "torchrec"),
        ("load_state_dict-semi_sync", FEW, "reference"),
        ("load_state_dict-window_adam", TINY, "reference"),
        ("sparse-adam", SPARSE, "torch"),
        ("load_state_dict-sparse_adam", SPARSE, "torch"),
        ("clip-adam", FEW, "torch"),
        ("clip-adam", FEW, "torchrec"),
        ("state", FEW, "torchrec"),
        ("state", FEW, "reference"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_peer_does_the_same_work(task, work, peer):
    if peer in ("torchrec", "fbgemm"):
        pytest.importorskip({"fbgemm": "fbgemm_gpu"}.get(peer, peer))
    ours = run("keyedopt.fused", TASKS[task], work)
    assert compare.error_between(ours, run(peer, TASKS[task], work)) < compare.TOLERANCE


@pytest.mark.parametrize(
    ("peer", "task", "work"),
    [
        ("torch", "train-lamb", TINY),
        ("torch", "state", FEW),
        ("fbgemm", "train-adam", TINY),
        ("torchrec", "train-adam", TINY),
        ("torchrec", "train_unpooled-adagrad", TINY),
        ("torchrec", "accumulate-adagrad", TINY),
        ("fbgemm", "clip-adam", FEW),
        ("torchft", "sparse-adam", SPARSE),
    ],
)
def test_what_a_peer_does_not_offer_is_said(peer, task, work):
    pytest.importorskip({"fbgemm": "fbgemm_gpu"}.get(peer, peer))
    about = find(peer)
    with pytest.raises(NotOffered, match=r"^(no |tables only)"):
        OWN_WAY.get(peer, make)(about.surface(), TASKS[task], work, "cpu")


# --- the run --------------------------------------------------------------------------------------


def test_what_is_not_there_is_refused():
    for works, names in (["nope"], []), ([], ["nope"]), (["small-step"], ["clip-adam"]):
        with pytest.raises(compare.RequestError):
            compare.chosen(works, names)
    with pytest.raises(TargetError, match="nope"):
        list(compare.implementations("reference", ["nope"]))


def test_the_default_set_is_of_what_there_is():
    pairs = compare.chosen([], [])
    assert {(work.name, task.name) for work, task in pairs} == {
        (work, task) for work, tasks in compare.DEFAULT for task in tasks
    }
    assert compare.chosen(["tower-24m"], []) == [
        (WORKLOADS["tower-24m"], TASKS[name]) for name in ("clip-adam", "state")
    ]


def compared(*others):
    found = [(find(name), find(name).surface()) for name in ("reference", *others)]
    pairs = [(SPARSE, TASKS["sparse-adam"])]
    return compare.compare(found, pairs, "cpu", BRIEF, UnitClock())


def test_a_run_compares_results_and_times():
    report = compared("torch", "torchft") if _has("torchft") else compared("torch")
    (row,) = report.rows
    assert (row.workload, row.task, row.implementation, row.peer) == (
        *("few-rows", "sparse-adam"),
        *("reference", "torch"),
    )
    assert row.matches
    assert (row.ratio, row.low, row.high, row.noise, row.pairs) == (1.0, 1.0, 1.0, 0.0, 3)
    assert row.bytes == SPARSE.sparse_adam_bytes()
    assert row.bound == row.bytes / report.bandwidth
    assert [item["who"] for item in report.skipped] == (["torchft"] if _has("torchft") else [])
    assert report.to_dict()["schema"] == compare.SCHEMA


def _has(module):
    try:
        __import__(module)
    except ImportError:
        return False
    return True


class Half(torch.optim.SparseAdam):
    """An optimizer that is fast since it does less."""

    def step(self, closure=None):
        self.param_groups[0]["params"][0].grad = None
        return super().step(closure)


class Broken(nn.Module):
    """An optimizer that cannot be made."""


def test_a_peer_whose_results_differ_does_not_match_and_one_that_breaks_is_skipped(monkeypatch):
    from keyedopt.conformance.implementation import Implementation, Surface

    class Names:
        pass

    def peer(name, cls):
        names = Names()
        names.SparseAdam = cls
        about = Implementation(name=name, root=names)
        return about, Surface(about)

    found = [(find("torch"), find("torch").surface()), peer("half", Half), peer("broken", Broken)]
    report = compare.compare(found, [(SPARSE, TASKS["sparse-adam"])], "cpu", BRIEF, UnitClock())
    (row,) = report.rows
    assert not row.matches
    assert row.error is None  # what it left alone has not changed by anything that could be compared
    (skipped,) = report.skipped
    assert skipped["who"] == "broken"
    assert "TypeError" in skipped["why"]
