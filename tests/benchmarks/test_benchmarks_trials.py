"""Plants, which are slow on purpose, and trials, which count how often the gate finds them."""

import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from keyedopt.benchmarks import ab_round, commit_builds, compare, gate
from keyedopt.benchmarks.ab_round import Measured, Request
from keyedopt.benchmarks.gate import LIMITS, Change, judge
from keyedopt.benchmarks.tasks import TASKS, make
from keyedopt.benchmarks.timing import CpuClock
from keyedopt.benchmarks.workloads import Lookups
from keyedopt.conformance.targets.find import find
from keyedopt.conformance.targets.implementation import TargetError
from keyedopt.tools import plant, trials

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
        return compare.start(lambda: make(surface, task, TINY, "cpu"), CpuClock(), 0.0, "cpu")

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
    with pytest.raises(TargetError, match="no planted regression"):
        plant.planted("nope")
    with pytest.raises(TargetError):
        find("keyedopt.tools.plant:nope")
    assert find("keyedopt.tools.plant:adam").name == "fused, adam planted"
    assert set(trials.PLANTS) >= {task for _, tasks in compare.DEFAULT for task in tasks} - {"state"}


class Rounds:
    """Rounds that take no time: a planted target is 10 % slower than the base."""

    def __init__(self):
        self.calls = []

    def measure(self, request, wanted, **_):
        self.calls.append((request.trees, request.targets, list(wanted)))
        slower = math.log(1.1) if "plant" in request.targets[1] else 0.0
        wobble = 0.002 * (len(self.calls) % 4 - 1.5)
        return [Measured(key, (1.0, math.exp(slower + wobble))) for key in wanted]


@pytest.fixture
def made_up(monkeypatch):
    """Let builds and rounds take no time."""
    made = Rounds()

    @contextlib.contextmanager
    def built(root, commits, progress):
        yield {commit: Path("built") / commit for commit in commits}

    monkeypatch.setattr(ab_round, "measure", made.measure)
    monkeypatch.setattr(commit_builds, "built_commits", built)
    return made


def test_trials_count_alarms_and_go_on_where_they_stopped(tmp_path, made_up, capsys):
    trials.run(tmp_path, trials=2, rounds=6)
    first = len(made_up.calls)
    figures = (tmp_path / "figures.md").read_text()
    assert "no alarm in any comparison in 2 of 2 trials" in figures
    assert "found in 2 of 2 trials" in figures
    assert [call[1] for call in made_up.calls[:6]] == [("fused", "fused")] * 6
    trials.run(tmp_path, trials=2, rounds=6)
    assert len(made_up.calls) == first
    stored = json.loads((tmp_path / "noise.json").read_text())
    (tmp_path / "noise.json").write_text(json.dumps({**stored, "commit": "earlier"}))
    trials.run(tmp_path, trials=3, rounds=6)
    assert made_up.calls[-1][0] == (Path("built/earlier"),) * 2
    assert "found in 3 of 3 trials" in capsys.readouterr().out
    assert (tmp_path / "figures.md").read_text() != figures


def test_trials_keep_what_each_round_gave(tmp_path, made_up):
    trials.run(tmp_path, trials=1, rounds=6)
    null, planted = map(json.loads, (tmp_path / "trials.jsonl").read_text().splitlines())
    assert (null["planted"], planted["planted"]) == ("nothing", "train_joined-rowwise_adagrad")
    for one in (*null["found"], *planted["found"]):
        assert len(one["slowdowns"]) == one["rounds"]
    assert min(planted["found"][0]["slowdowns"]) > 0.09
    assert {one["key"][1] for one in planted["found"]} == {"train_joined-rowwise_adagrad"}


def test_trials_of_a_gate_that_sees_nothing_say_so(tmp_path, made_up, monkeypatch):
    fine = Change(0.0, 0.0, 0.0, 0.5, "fine", 2)
    monkeypatch.setattr(gate, "run", lambda request, noise, limits: dict.fromkeys(noise, fine))
    trials.run(tmp_path, trials=1, rounds=2)
    assert "found in 0 of 1 trials" in (tmp_path / "figures.md").read_text()


def test_a_plant_is_judged_at_the_levels_of_the_whole_set(monkeypatch):
    noise = {("w", task): [0.0, 0.001] * 4 for task in ("train-sgd", "train-adam", "train-adagrad")}
    asked = []

    def run(request, given, limits):
        asked.append((request.targets, list(given), limits.comparisons))
        return {}

    monkeypatch.setattr(gate, "run", run)
    trials.trial("train-adam", Request((Path("a"),) * 2, ("fused", "fused")), noise)
    assert asked == [(("fused", "keyedopt.tools.plant:adam"), [("w", "train-adam")], 3)]
    few, many = (
        judge(
            {("w", "t"): [0.0, 0.001] * 4},
            lambda wanted: [Measured(key, (1.0, 1.2)) for key in wanted],
            replace(LIMITS, comparisons=count),
        )
        for count in (1, 100)
    )
    assert many["w", "t"].low < few["w", "t"].low
