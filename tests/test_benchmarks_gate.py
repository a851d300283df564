"""The gate: what it says of rounds that are made up, baselines it refuses, plants, rounds and trials."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from making import refused

from keyedopt.benchmarks import baseline as baselines
from keyedopt.benchmarks import compare, gate, plant, rounds, trials
from keyedopt.benchmarks.baseline import Baseline, BaselineError
from keyedopt.benchmarks.gate import Limits, judge
from keyedopt.benchmarks.rounds import Measured, Request
from keyedopt.benchmarks.tasks import TASKS, make
from keyedopt.benchmarks.timing import CpuClock
from keyedopt.benchmarks.workloads import Lookups
from keyedopt.cli import gate as command
from keyedopt.conformance.implementation import TargetError, find

TINY = Lookups("tiny", "for tests", tables=2, rows=50, dim=4, batch=6, pooling=3)
KEYS = [("8x200k-zipf", task, "torch") for task in ("train-sgd", "train-adam", "train-adagrad")]


def made(slowdowns, keys=KEYS, noise=0.001):
    rows = [
        {"workload": key[0], "task": key[1], "peer": key[2], "slowdowns": list(values), "noise": noise}
        for key, values in zip(keys, slowdowns, strict=True)
    ]
    work = baselines.fingerprints([key[0] for key in keys])
    return Baseline(baselines.machine("cpu", 1), work, rows)


class Machine:
    """Rounds of a machine whose ratios vary between processes; some comparisons are slower."""

    def __init__(self, seed, spread, slower=None):
        self.random, self.spread, self.slower = np.random.default_rng(seed), spread, slower or {}
        self.asked = []

    def __call__(self, wanted):
        self.asked.append(list(wanted))
        return {
            key: float(self.random.normal(math.log1p(self.slower.get(key, 0.0)), self.spread))
            for key in wanted
        }


def trial(seed, slower=None, spread=0.03, count=9):
    keys = [("work", f"task {number}", "torch") for number in range(count)]
    machine = Machine(seed, spread)
    before = [machine(keys) for _ in range(16)]
    baseline = made([[one[key] for one in before] for key in keys], keys)
    machine.slower = {keys[0]: slower} if slower else {}
    found = judge(baseline, machine)
    return [key for key, change in found.items() if change.verdict == "worse"], keys[0]


@pytest.mark.parametrize("spread", [0.01, 0.03])
def test_a_planted_tenth_is_found_and_nothing_else(spread):
    found = [trial(seed, 0.10, spread) for seed in range(20)]
    assert sum(alarms == [key] for alarms, key in found) >= 19


@pytest.mark.parametrize("spread", [0.01, 0.03, 0.06])
def test_nothing_is_found_where_nothing_changed(spread):
    assert sum(bool(trial(seed, None, spread)[0]) for seed in range(20)) <= 1


def test_an_alarm_takes_more_rounds_and_only_what_is_open_is_measured_again():
    baseline = made([[0.0, 0.001] * 4] * 3)
    machine = Machine(1, 0.001, {KEYS[1]: 0.2})
    found = judge(baseline, machine)
    assert [change.verdict for change in found.values()] == ["fine", "worse", "fine"]
    assert [change.rounds for change in found.values()] == [2, 6, 2]
    assert machine.asked == [KEYS, KEYS, *[[KEYS[1]]] * 4]
    assert found[KEYS[1]].value == pytest.approx(0.2, abs=0.01)
    assert found[KEYS[1]].low < found[KEYS[1]].value < found[KEYS[1]].high
    assert found[KEYS[1]].chance < 1e-4


def test_a_change_below_the_tolerance_is_no_alarm_however_sure_it_is():
    machine = Machine(1, 0.0001, {KEYS[0]: 0.03})
    found = judge(made([[0.0, 0.001] * 8] * 3), machine)
    assert {change.verdict for change in found.values()} == {"fine"}


def test_what_got_faster_is_no_alarm():
    found = judge(made([[0.0, 0.001] * 8] * 3), Machine(1, 0.001, {KEYS[0]: -0.5}))
    assert found[KEYS[0]].verdict == "fine"


def test_what_stays_undecided_is_unclear_and_no_alarm():
    limits = Limits(most=3)
    found = judge(made([[0.0, 0.6] * 3] * 3), Machine(1, 0.5), limits)
    assert {change.verdict for change in found.values()} == {"unclear"}
    assert {change.rounds for change in found.values()} == {3}


def test_the_noise_floor_is_the_least_spread():
    calm = gate.change([0.0] * 8, [0.0] * 2, Limits(), 1, noise=0.1)
    assert calm.high - calm.low > 0.2


def test_what_cannot_be_measured_any_more_is_missing():
    found = judge(made([[0.0, 0.001] * 8] * 3), lambda wanted: {})
    assert {change.verdict for change in found.values()} == {"missing"}


# --- baselines ------------------------------------------------------------------------------------


def written(tmp_path, **changes):
    plain = json.loads(made([[0.0, 0.001] * 4] * 3).to_text())
    path = tmp_path / "base.json"
    path.write_text(json.dumps({**plain, **changes}))
    return path


def test_a_baseline_is_read_as_it_was_written(tmp_path):
    baseline = baselines.read(written(tmp_path))
    assert baseline == made([[0.0, 0.001] * 4] * 3)
    baselines.refuse_other(baseline, baselines.machine("cpu", 1), baselines.fingerprints(baseline.work))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": 2}, "format version 2"),
        ({"kind": "keyedopt-bench"}, "is not a baseline"),
        ({"rows": []}, "fewer than two rounds"),
        ({"rows": [{"workload": "w"}]}, "is not a baseline"),
        ({"rows": 1}, "is not a baseline"),
        ({"extra": 1}, "is not a baseline"),
        ({"machine": {"cpu": "abacus"}}, "of another machine: capability was None"),
        ({"work": {"8x200k-zipf": "0"}}, "'8x200k-zipf' has changed since"),
        ({"work": {"gone": "0"}}, "none of here: 'gone'"),
    ],
)
def test_a_baseline_of_something_else_is_refused(run_line, tmp_path, changes, said, monkeypatch):
    monkeypatch.setattr(command, "in_a_process", lambda request: 1 / 0)
    assert said in refused(run_line("bench", "--gate", written(tmp_path, **changes)))


def test_a_baseline_of_other_threads_or_versions_is_refused(run_line, tmp_path):
    path = written(tmp_path)
    assert "threads was 1, here it is 2" in refused(run_line("bench", "--gate", path, "--threads", "2"))
    machine = baselines.machine("cpu", 1)
    older = {**machine, "versions": {**machine["versions"], "torch": "2.0"}}
    assert "versions was" in refused(run_line("bench", "--gate", written(tmp_path, machine=older)))


def test_a_file_that_is_no_baseline_is_refused(tmp_path):
    path = tmp_path / "x.json"
    for text in ("{", "[]", "null", ""):
        path.write_text(text)
        with pytest.raises(BaselineError, match="write-baseline"):
            baselines.read(path)


# --- the command ----------------------------------------------------------------------------------


class Processes:
    """Rounds that take no time: what they were asked, and made-up slowdowns."""

    def __init__(self, slower=0.0):
        self.slower, self.requests = slower, []

    def __call__(self, request):
        self.requests.append(request)
        found = []
        for number, (work, task, peer) in enumerate(request.wanted):
            wobble = 0.001 * (len(self.requests) % 3)
            slowdown = wobble + (self.slower if number == 0 else 0)
            found.append(Measured(work, task, peer or "torch", slowdown, 0.001, 1.0, 1.0, 9))
        return found


LINE = ("bench", "--workload", "8x200k-zipf", "--task", "train-sgd", "--task", "train-adam")


def test_a_baseline_is_written_and_then_held(run_line, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "in_a_process", processes := Processes())
    done = run_line(
        *LINE, "--write-baseline", tmp_path / "b.json", "--rounds", "5", "--implementation", "fused"
    )
    assert done.returncode == 0, done.stderr
    assert len(processes.requests) == 5
    assert {request.threads for request in processes.requests} == {1}
    done = run_line("bench", "--gate", tmp_path / "b.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 comparisons, 0 worse" in done.stdout


def test_the_gate_names_what_got_worse(run_line, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "in_a_process", Processes())
    run_line(*LINE, "--write-baseline", tmp_path / "b.json", "--rounds", "5")
    monkeypatch.setattr(command, "in_a_process", Processes(slower=math.log(1.25)))
    done = run_line("bench", "--gate", tmp_path / "b.json")
    assert done.returncode == 1
    assert "worse: 8x200k-zipf train-sgd takes 25% longer than in the baseline, against torch" in done.stdout
    assert "2 comparisons, 1 worse" in done.stdout
    done = run_line("bench", "--gate", tmp_path / "b.json", "--workload", "tower-24m")
    assert "none of the workloads" in refused(done)


def test_a_round_that_breaks_down_is_one_line(run_line, tmp_path, monkeypatch):
    def broken(request):
        raise rounds.RoundError("a round broke down: Killed")

    monkeypatch.setattr(command, "in_a_process", broken)
    assert "broke down" in refused(run_line(*LINE, "--write-baseline", tmp_path / "b.json"))
    assert not (tmp_path / "b.json").exists()
    assert "broke down" in refused(run_line("bench", "--gate", written(tmp_path)))


# --- rounds ---------------------------------------------------------------------------------------


def test_a_round_takes_the_first_peer_that_offers_the_task(monkeypatch):
    for name in ("WORKLOADS", "TASKS"):
        monkeypatch.setattr(
            rounds, name, {**getattr(rounds, name), **({"tiny": TINY} if name == "WORKLOADS" else {})}
        )
    monkeypatch.setattr(rounds, "BUDGET", compare.Budget(seconds=0.0, warmup=0.0, least=3, most=3))
    wanted = (("tiny", "train-lamb", ""), ("tiny", "train-sgd", ""), ("tiny", "train-sgd", "torch"))
    request = Request("reference", wanted, peers=("torchft", "torch", "keyedopt.fused"), seconds=0.0)
    found = list(rounds.measure(request, CpuClock()))
    assert [item.key for item in found] == [
        ("tiny", "train-lamb", "keyedopt.fused"),
        ("tiny", "train-sgd", "torch"),
        ("tiny", "train-sgd", "torch"),
    ]
    assert {item.pairs for item in found} == {3}
    gone = Request("reference", (("tiny", "train-lamb", "torch"),), seconds=0.0)
    assert list(rounds.measure(gone, CpuClock())) == []


def test_a_round_runs_in_a_process_of_its_own():
    wanted = (("small-step", "train-sgd", ""),)
    (item,) = rounds.in_a_process(Request("reference", wanted, peers=("torch",), seconds=0.01))
    assert item.key == ("small-step", "train-sgd", "torch")
    assert item.slowdown == pytest.approx(math.log(item.seconds / item.peer_seconds))
    with pytest.raises(rounds.RoundError, match="nope"):
        rounds.in_a_process(Request("nope", wanted))


# --- plants and trials ----------------------------------------------------------------------------


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


def test_trials_count_alarms_and_go_on_where_they_stopped(tmp_path, monkeypatch, capsys):
    calls = []

    def measured(target, wanted):
        calls.append(target)
        slower = math.log(1.1) if "plant" in target else 0.0
        wobble = 0.002 * (len(calls) % 4)
        return [Measured(w, t, p or "torch", slower + wobble, 0.001, 1.0, 1.0, 9) for w, t, p in wanted]

    monkeypatch.setattr(trials, "measured", measured)
    trials.run(tmp_path, trials=2, rounds=6)
    first = len(calls)
    assert "no alarm in any comparison in 2 of 2 trials" in (tmp_path / "figures.md").read_text()
    assert "found in 2 of 2 trials" in (tmp_path / "figures.md").read_text()
    assert calls[:6] == ["fused"] * 6
    trials.run(tmp_path, trials=2, rounds=6)
    assert len(calls) == first
    trials.run(tmp_path, trials=3, rounds=6)
    assert "found in 3 of 3 trials" in capsys.readouterr().out


def test_limits_can_be_of_more_comparisons_than_are_measured():
    few = gate.change([0.0, 0.01] * 8, [0.05, 0.06], Limits(), 1)
    many = gate.change([0.0, 0.01] * 8, [0.05, 0.06], Limits(), 100)
    assert many.low < few.low
    part = trials.part(made([[0.0, 0.001] * 4] * 3), "train-adam")
    assert [row["task"] for row in part.rows] == ["train-adam"]
    found = judge(part, Machine(1, 0.001), dataclasses.replace(Limits(), comparisons=50))
    assert list(found) == [KEYS[1]]
