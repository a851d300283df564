"""Workloads, tasks and peers, and what a run of them says; no real time is asserted."""

import dataclasses

import pytest
import torch
from clocks import BRIEF, UnitClock

from keyedopt.benchmarks import compare
from keyedopt.benchmarks.peers import OWN_WAY
from keyedopt.benchmarks.tasks import TASKS, NotOffered, make
from keyedopt.benchmarks.timing import Bandwidth
from keyedopt.benchmarks.workloads import STATE, WORKLOADS, Dense, Lookups, SparseGradients, _unique, _values
from keyedopt.conformance.targets.find import find
from keyedopt.conformance.targets.implementation import TargetError

TINY = Lookups("tiny", "for tests", tables=2, rows=50, dim=4, batch=6, pooling=3)
FEW = Dense("few", "for tests", ((4, 3), (3,)), 2)
SPARSE = SparseGradients("few-rows", "for tests", tables=2, rows=30, dim=4, lookups=40)


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


# --- tasks and peers ------------------------------------------------------------------------------


def run(name, task, work):
    about = find(name)
    made = compare.start(
        lambda: OWN_WAY.get(name, make)(about.surface(), task, work, "cpu"), UnitClock(), 0.0, "cpu"
    )
    again = {key: value.clone() for key, value in made.before.items()}
    assert any(not torch.equal(value, made.after[key]) for key, value in again.items())
    return made


def test_a_figure_that_is_asked_of_a_backend_is_refused_where_another_one_ran(monkeypatch):
    about, task = find("fused"), TASKS["train-lars_sgd"]
    started = (lambda: make(about.surface(), task, TINY, "cpu"), UnitClock(), 0.0, "cpu", about)
    assert compare.start(*started).backend == "native"
    monkeypatch.setenv("KEYEDOPT_BACKEND", "torch")
    assert compare.start(*started).backend == "torch"
    monkeypatch.setenv("KEYEDOPT_BACKEND", "fbgemm")
    with pytest.raises(NotOffered, match="asked of the backend fbgemm, but native ran"):
        compare.start(*started)


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


def test_the_bandwidth_is_measured_beside_each_task_and_the_highest_is_kept(monkeypatch):
    measured = iter([Bandwidth(1e9, 2e9), Bandwidth(1e9, 4e9)])  # at the beginning, and beside the task
    monkeypatch.setattr(compare.timing, "memory_bandwidth", lambda clock, device: next(measured))
    report = compared("torch")
    (row,) = report.rows
    assert (row.bound, row.copy_bound, report.bandwidth) == (row.bytes / 4e9, row.bytes / 1e9, 4e9)
    measured = iter([Bandwidth(4e9, 4e9), Bandwidth(2e9, 2e9)])
    report = compared("torch")
    assert (report.rows[0].bound, report.bandwidth) == (report.rows[0].bytes / 2e9, 4e9)


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


class Broken(torch.optim.SparseAdam):
    """An optimizer that cannot be made."""

    def __init__(self, params):
        raise TypeError("broken")


def test_a_peer_whose_results_differ_does_not_match_and_one_that_breaks_is_skipped(monkeypatch):
    from keyedopt.conformance.targets.implementation import Implementation, Surface

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
