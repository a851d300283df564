"""Plants, which are slow on purpose, and trials, which count how often the gate finds them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from keyedopt.benchmarks import baseline as baselines
from keyedopt.benchmarks import compare, guard, plant, rounds, trials
from keyedopt.benchmarks.gate import LIMITS, Change, judge
from keyedopt.benchmarks.rounds import Measured
from keyedopt.benchmarks.tasks import TASKS, make
from keyedopt.benchmarks.timing import CpuClock
from keyedopt.benchmarks.workloads import Lookups
from keyedopt.conformance.targets.implementation import TargetError, find

TINY = Lookups("tiny", "for tests", tables=2, rows=50, dim=4, batch=6, pooling=3)


class FakeTime:
    """A clock that goes on by a millisecond whenever it is looked at."""

    def __init__(self):
        self.at = 0.0

    def thread_time(self):
        self.at += 0.001
        return self.at


def test_a_slow_step_takes_a_tenth_longer(monkeypatch):
    monkeypatch.setattr(plant, "time", fake := FakeTime())

    def work():
        fake.at += 1.0
        return "done"

    assert plant.slowly(work) == "done"
    assert fake.at == pytest.approx(1.1, abs=0.01)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_a_planted_optimizer_of_tables_does_the_same_work_slowly(optimizer, monkeypatch):
    monkeypatch.setattr(plant, "time", fake := FakeTime())
    slow, plain = plant.planted(optimizer).surface(), find("fused").surface()

    def run(surface, name):
        task = TASKS[f"train-{name}"]
        return compare.start(lambda: make(surface, task, TINY, "cpu"), CpuClock(), 0.0)

    assert compare.error_between(run(slow, optimizer), run(plain, optimizer)) == 0
    looked = fake.at
    assert looked > 2 * compare.RUNS * 3 * 0.001  # forwards and backwards were timed, and waited for
    run(slow, "lamb")
    assert fake.at == looked


@pytest.mark.parametrize("what", plant.STEPPED)
def test_a_planted_step_is_slow(what, monkeypatch):
    monkeypatch.setattr(plant, "time", fake := FakeTime())
    surface = plant.planted(what).surface()
    param = torch.nn.Parameter(torch.ones(3, 2))
    if what == "sparse_adam":
        optimizer = surface.SparseAdam([param])
        param.grad = torch.sparse_coo_tensor([[1]], [[1.0, 1.0]], (3, 2))
    else:
        inner = surface.KeyedOptimizerWrapper({"p": param}, lambda given: torch.optim.SGD(given, lr=0.1))
        optimizer = surface.GradientClippingOptimizer(inner, surface.GradientClipping.NORM, 1.0)
        param.grad = torch.ones(3, 2)
    optimizer.step()
    assert not torch.equal(param, torch.ones(3, 2))
    assert fake.at > 0


def test_what_cannot_be_planted_is_refused():
    with pytest.raises(TargetError, match="nothing to plant"):
        plant.planted("nope")
    with pytest.raises(TargetError):
        find("keyedopt.benchmarks.plant:nope")
    assert find("keyedopt.benchmarks.plant:adam").name == "fused, adam planted"
    assert set(trials.PLANTS) >= {task for _, tasks in compare.DEFAULT for task in tasks} - {"state"}


class Rounds:
    """Rounds that take no time: a planted target is a tenth slower than what the build has."""

    def __init__(self):
        self.calls = []

    def against_build(self, request, wanted, at, implementation):
        self.calls.append((request.implementation, implementation, list(wanted)))
        slower = math.log(1.1) if "plant" in request.implementation else 0.0
        wobble = 0.002 * (len(self.calls) % 4 - 1.5)
        return [Measured(key, implementation, slower + wobble) for key in wanted]

    def against_peers(self, request, wanted, at):
        return [Measured((*key[:2], "torch"), "torch", 0.1) for key in wanted]


@pytest.fixture
def made_up(monkeypatch, small_build):
    made = Rounds()
    for name in ("against_build", "against_peers"):
        monkeypatch.setattr(rounds, name, getattr(made, name))
    return made


def test_trials_count_alarms_and_go_on_where_they_stopped(tmp_path, made_up, capsys):
    trials.run(tmp_path, trials=2, rounds=6)
    first = len(made_up.calls)
    figures = (tmp_path / "figures.md").read_text()
    assert "no alarm in any comparison in 2 of 2 trials" in figures
    assert "found in 2 of 2 trials" in figures
    assert [call[:2] for call in made_up.calls[:6]] == [("fused", "fused")] * 6
    trials.run(tmp_path, trials=2, rounds=6)
    assert len(made_up.calls) == first
    trials.run(tmp_path, trials=3, rounds=6)
    assert "found in 3 of 3 trials" in capsys.readouterr().out
    assert (tmp_path / "figures.md").read_text() != figures


def test_trials_keep_what_each_round_gave(tmp_path, made_up):
    trials.run(tmp_path, trials=1, rounds=6)
    null, planted = map(json.loads, (tmp_path / "trials.jsonl").read_text().splitlines())
    assert (null["planted"], planted["planted"]) == ("nothing", "train-rowwise_adagrad")
    for one in (*null["found"], *planted["found"]):
        assert len(one["slowdowns"]) == one["rounds"]
    assert min(planted["found"][0]["slowdowns"]) > 0.09
    assert {one["key"][1] for one in planted["found"]} == {"train-rowwise_adagrad"}


def test_trials_of_a_gate_that_sees_nothing_say_so(tmp_path, made_up, monkeypatch):
    fine = Change(0.0, 0.0, 0.0, 0.5, "fine", 2)
    monkeypatch.setattr(
        guard, "hold", lambda baseline, *given, **named: (dict.fromkeys(baseline.slowdowns(), fine), {})
    )
    trials.run(tmp_path, trials=1, rounds=2)
    assert "found in 0 of 1 trials" in (tmp_path / "figures.md").read_text()


def test_a_plant_is_judged_at_the_levels_of_the_whole_set():
    keys = [("8x200k-zipf", task, "torch") for task in ("train-sgd", "train-adam", "train-adagrad")]
    rows = {key: [0.0, 0.001] * 4 for key in keys}
    baseline = baselines.made_of(rows, {}, "fused", "cpu", 1, {"file": "x", "sha256": "0"})
    part = trials.part(baseline, "train-adam")
    assert [row["task"] for row in part.rows] == ["train-adam"]

    def measure(wanted):
        return [Measured(key, "fused", float(np.log(1.2))) for key in wanted]

    few, many = (judge(part, measure, replace(LIMITS, comparisons=count)) for count in (1, 100))
    assert list(few) == list(many) == [keys[1]]
    assert many[keys[1]].low < few[keys[1]].low
