"""The gate: what it says of rounds that are made up, baselines it refuses, and the command."""

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
from making import module, refused

from keyedopt.benchmarks import baseline as baselines
from keyedopt.benchmarks import builds, gate, rounds, sides
from keyedopt.benchmarks.baseline import Baseline, BaselineError
from keyedopt.benchmarks.gate import Limits, judge
from keyedopt.benchmarks.rounds import Measured

KEYS = [("8x200k-zipf", task, "torch") for task in ("train-sgd", "train-adam", "train-adagrad")]
BUILD = {"file": "base.build.zip", "sha256": "0"}
#: Rounds of a baseline that are all but alike.
CALM = [0.0, 0.001, -0.001, 0.0] * 2


def made(slowdowns, keys=KEYS, build=BUILD):
    return baselines.made_of(dict(zip(keys, slowdowns, strict=True)), {}, "fused", "cpu", 1, build)


class Machine:
    """Rounds of a machine that varies between processes; some comparisons are slower, some rounds are off."""

    def __init__(self, seed, spread, slower=None, off=0.0):
        self.random, self.spread, self.slower, self.off = (
            np.random.default_rng(seed),
            spread,
            slower or {},
            off,
        )
        self.asked = []

    def __call__(self, wanted):
        self.asked.append(list(wanted))
        return [Measured(key, "fused", self.slowdown(key)) for key in wanted]

    def slowdown(self, key):
        value = self.random.normal(math.log1p(self.slower.get(key, 0.0)), self.spread)
        if self.random.random() < self.off:
            value += self.random.choice([-1, 1]) * self.random.uniform(0.1, 0.35)
        return float(value)


def given(*rows):
    """Return rounds of the first comparison that give just these slowdowns; the others give nothing."""
    left = list(rows)

    def measure(wanted):
        value = left.pop(0)
        return [Measured(key, "fused", value if key == KEYS[0] else 0.0) for key in wanted]

    return measure


def trial(seed, slower=None, spread=0.02, off=0.0, build=BUILD):
    keys = [("work", f"task {number}", "torch") for number in range(9)]
    machine = Machine(seed, spread, off=off)
    baseline = made([[machine.slowdown(key) for _ in range(8)] for key in keys], keys, build)
    machine.slower = {keys[0]: slower} if slower else {}
    found = judge(baseline, machine)
    return [key for key, change in found.items() if change.verdict == "worse"], keys[0]


@pytest.mark.parametrize("build", [BUILD, None], ids=["build", "peer"])
@pytest.mark.parametrize("off", [0.0, 0.02])
def test_a_planted_tenth_is_found_and_nothing_else(off, build):
    found = [trial(seed, 0.10, off=off, build=build) for seed in range(20)]
    assert sum(alarms == [key] for alarms, key in found) >= 19


@pytest.mark.parametrize("build", [BUILD, None], ids=["build", "peer"])
@pytest.mark.parametrize(("spread", "off"), [(0.01, 0.0), (0.01, 0.02), (0.03, 0.02)])
def test_nothing_is_found_where_nothing_changed(spread, off, build):
    assert sum(bool(trial(seed, None, spread, off, build)[0]) for seed in range(20)) <= 1


@pytest.mark.parametrize("before", [CALM, [*CALM[:7], 0.3], [*CALM[:7], -0.3]], ids=["calm", "up", "down"])
@pytest.mark.parametrize("place", range(5))
def test_a_round_that_is_off_raises_no_alarm(before, place):
    rows = [0.002, -0.002, 0.001, -0.001, 0.0]
    rows[place] = 0.35
    found = judge(made([before, CALM, CALM]), given(*rows, *[0.0] * 7))
    assert {change.verdict for change in found.values()} == {"fine"}


@pytest.mark.parametrize("place", range(5))
def test_a_round_that_is_off_hides_nothing(place):
    rows = [0.101, 0.099, 0.1, 0.098, 0.102, *[0.1] * 7]
    rows[place] = -0.25
    found = judge(made([CALM] * 3), given(*rows))
    assert found[KEYS[0]].verdict == "worse"
    assert found[KEYS[0]].value == pytest.approx(0.105, abs=0.005)


def test_two_rounds_of_five_that_are_off_raise_no_alarm():
    found = judge(made([CALM] * 3), given(0.3, 0.0, 0.2, 0.001, -0.001, *[0.0] * 7))
    assert found[KEYS[0]].verdict == "fine"


def test_an_alarm_takes_more_rounds_and_only_what_is_open_is_measured_again():
    machine = Machine(1, 0.001, {KEYS[1]: 0.2})
    found = judge(made([CALM] * 3), machine)
    assert [change.verdict for change in found.values()] == ["fine", "worse", "fine"]
    assert [change.rounds for change in found.values()] == [2, 5, 2]
    assert machine.asked == [KEYS, KEYS, *[[KEYS[1]]] * 3]
    change = found[KEYS[1]]
    assert change.value == pytest.approx(0.2, abs=0.01)
    assert change.low < change.value < change.high
    assert change.chance < 1e-4
    assert len(change.slowdowns) == 5


def test_the_formulas_are_those_that_are_written_down():
    """By hand: residuals are 0.01 four times, 0, 0.03 and 0.47, so the median of their sizes is 0.01."""
    limits, before, now = Limits(), [0.01, -0.01, 0.01, -0.01], [0.03, 0.06, 0.53]
    for itself, freedom, parts in ((True, 6, 1 / 3), (False, 5, 1 / 3 + 1 / 4)):
        cut = 3 * 1.4826 * 0.01
        spread = math.sqrt((4 * 0.01**2 + 0.03**2 + cut**2) / freedom)
        reach = gate.student(1 - 0.05 / 9, freedom) * spread * math.sqrt(math.pi / 2 * parts)
        change = gate.change(before, now, limits, 3, itself)
        assert math.log1p(change.value) == pytest.approx(0.06)
        assert math.log1p(change.low) == pytest.approx(0.06 - reach)
        assert math.log1p(change.high) == pytest.approx(0.06 + reach)


def test_without_a_build_the_middle_of_the_baseline_counts():
    before = [0.5, 0.501, 0.499, 0.5]
    assert gate.change(before, [0.5, 0.501], Limits(), 1, itself=False).verdict == "fine"
    assert gate.change(before, [0.7] * 5, Limits(), 1, itself=False).value == pytest.approx(math.expm1(0.2))
    assert gate.change(before, [0.5] * 5, Limits(), 1, itself=True).verdict == "worse"


def test_a_change_below_the_tolerance_is_no_alarm_however_sure_it_is():
    found = judge(made([CALM] * 3), Machine(1, 0.0001, {KEYS[0]: 0.03}))
    assert {change.verdict for change in found.values()} == {"fine"}


def test_what_got_faster_is_no_alarm():
    found = judge(made([CALM] * 3), Machine(1, 0.001, {KEYS[0]: -0.5}))
    assert found[KEYS[0]].verdict == "fine"


def test_what_stays_undecided_is_unclear_and_no_alarm():
    found = judge(made([[0.6, -0.6] * 3] * 3), Machine(1, 0.5), Limits(most=3))
    assert {change.verdict for change in found.values()} == {"unclear"}
    assert {change.rounds for change in found.values()} == {3}


def test_the_spread_of_rounds_is_never_taken_for_nothing():
    narrow, wide = (gate.change([0.0] * 8, [0.0] * 2, Limits(floor=floor), 1, True) for floor in (0.01, 0.1))
    assert 0 < narrow.high < wide.high


def test_what_cannot_be_measured_any_more_is_missing():
    found = judge(made([CALM] * 3), lambda wanted: [Measured(KEYS[0], "fused", None, "no Adam")])
    assert {change.verdict for change in found.values()} == {"missing"}
    assert found[KEYS[0]].why == "no Adam"


# --- baselines ------------------------------------------------------------------------------------


def written(tmp_path, **changes):
    plain = json.loads(made([CALM] * 3, build=None).to_text())
    path = tmp_path / "base.json"
    path.write_text(json.dumps({**plain, **changes}))
    return path


@pytest.fixture
def no_processes(monkeypatch):
    """Let a process that is started be an error."""
    monkeypatch.setattr(sides, "Side", lambda *given: 1 / 0)
    monkeypatch.setattr(rounds, "Side", lambda *given: 1 / 0)


def test_a_baseline_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "base.json"
    baseline = made([CALM] * 3)
    path.write_text(baseline.to_text())
    assert baselines.read(path) == baseline
    baselines.refuse_other(baseline, baselines.machine("cpu", 1), baselines.fingerprints(baseline.work))


ROW = {"workload": "w", "task": "t", "peer": "", "slowdowns": [0.0, 0.1], "ratios": []}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": 1}, "format version 1"),
        ({"kind": "keyedopt-bench"}, "is not a baseline"),
        ({"rows": []}, "fewer than two rounds"),
        ({"rows": [{**ROW, "slowdowns": [0.0]}]}, "fewer than two rounds"),
        ({"rows": [{**ROW, "slowdowns": [0.0, math.inf]}]}, "fewer than two rounds"),
        ({"rows": [{**ROW, "ratios": [-1.0]}]}, "is not a baseline"),
        ({"rows": [{**ROW, "workload": 1}]}, "is not a baseline"),
        ({"rows": [{"workload": "w"}]}, "is not a baseline"),
        ({"rows": 1}, "is not a baseline"),
        ({"extra": 1}, "is not a baseline"),
        ({"build": {"file": "../x.zip", "sha256": "0"}}, "is not a baseline"),
        ({"build": {"file": "x.zip"}}, "is not a baseline"),
        ({"machine": {"cpu": "abacus"}}, "of another machine: "),
        ({"work": {"8x200k-zipf": "0"}}, "'8x200k-zipf' has changed since"),
        ({"work": {"gone": "0"}}, "none of here: 'gone'"),
        ({"rows": [{**ROW, "task": "gone"}]}, "none of here: 'gone'"),
        ({"build": {"file": "gone.build.zip", "sha256": "0"}}, "gone.build.zip, cannot be read"),
    ],
)
@pytest.mark.usefixtures("no_processes")
def test_a_baseline_of_something_else_is_refused(run_line, tmp_path, changes, said):
    assert said in refused(run_line("bench", "--gate", written(tmp_path, **changes)))


@pytest.mark.usefixtures("no_processes")
def test_a_baseline_of_other_threads_versions_or_builds_is_refused(run_line, tmp_path):
    path = written(tmp_path)
    assert "threads was 1, here it is 2" in refused(run_line("bench", "--gate", path, "--threads", "2"))
    machine = baselines.machine("cpu", 1)
    older = {**machine, "versions": {**machine["versions"], "torch": "2.0"}}
    assert "versions was" in refused(run_line("bench", "--gate", written(tmp_path, machine=older)))
    foreign = {**machine, "abi": "cpython-27-pdp11"}
    said = refused(run_line("bench", "--gate", written(tmp_path, machine=foreign)))
    assert f"abi was 'cpython-27-pdp11', here it is {builds.abi()!r}" in said


def test_a_file_that_is_no_baseline_is_refused(tmp_path):
    path = tmp_path / "x.json"
    for text in ("{", "[]", "null", "", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(BaselineError, match="write-baseline"):
            baselines.read(path)


# --- the command ----------------------------------------------------------------------------------


class Rounds:
    """Rounds that take no time: what they were asked, of which code, and made-up slowdowns."""

    def __init__(self, monkeypatch):
        self.slower, self.missing, self.against = 0.0, "", []
        monkeypatch.setattr(rounds, "against_build", self.against_build)
        monkeypatch.setattr(rounds, "against_peers", self.against_peers)

    def against_build(self, request, wanted, at, implementation):
        today, then = ((tree / "keyedopt/fused/code.py").read_text() for tree in (at.today, at.then))
        self.against.append((request.implementation, today, implementation, then, request.threads))
        return self._measured(wanted, 0.0)

    def against_peers(self, request, wanted, at):
        self.against.append((request.implementation, "peers"))
        return self._measured([(*key[:2], key[2] or "torch") for key in wanted], -math.log(2))

    def _measured(self, wanted, ratio):
        wobble = 0.001 * (len(self.against) % 3)
        slow = {"train-sgd": self.slower + wobble + ratio}
        return [
            Measured(key, "x", None, "it is gone")
            if key[1] == self.missing
            else Measured(key, "x", slow.get(key[1], wobble + ratio))
            for key in wanted
        ]


@pytest.fixture
def made_up(monkeypatch):
    return Rounds(monkeypatch)


LINE = ("bench", "--workload", "8x200k-zipf", "--task", "train-sgd", "--task", "train-adam")


def test_a_baseline_is_written_with_its_build_and_then_held(run_line, tmp_path, made_up, small_build):
    path = tmp_path / "b.json"
    done = run_line(*LINE, "--write-baseline", path, "--rounds", "5", "--implementation", "fused")
    assert (done.returncode, done.stderr) == (0, "")
    assert made_up.against == [("fused", "peers")] * 2 + [("fused", "then", "fused", "then", 1)] * 5
    assert "2 comparisons of 5 rounds" in done.stdout
    assert baselines.read(path).build["file"] in done.stdout
    made_up.against.clear()
    small_build.write_text("now")
    done = run_line("bench", "--gate", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert made_up.against == [("fused", "now", "fused", "then", 1)] * 2 + [("fused", "peers")]
    assert "2 comparisons, 0 worse or missing, 0 unclear" in done.stdout
    assert "2.00" in done.stdout  # the ratio to the peer


def test_the_gate_names_what_got_worse(run_line, tmp_path, made_up, small_build):
    path = tmp_path / "b.json"
    run_line(*LINE, "--write-baseline", path, "--rounds", "5")
    made_up.slower = math.log(1.25)
    done = run_line("bench", "--gate", path)
    assert done.returncode == 1
    assert "worse: 8x200k-zipf train-sgd takes 25% longer than in the baseline, by chance" in done.stdout
    assert "torch took 2.00 times as long then, 1.60 now" in done.stdout
    assert "2 comparisons, 1 worse" in done.stdout
    done = run_line("bench", "--gate", path, "--task", "train-adam")
    assert done.returncode == 0
    assert "1 comparisons, 0 worse" in done.stdout
    assert "none of the workloads" in refused(run_line("bench", "--gate", path, "--workload", "tower-24m"))


def test_the_gate_names_what_is_missing(run_line, tmp_path, made_up, small_build):
    path = tmp_path / "b.json"
    run_line(*LINE, "--write-baseline", path, "--rounds", "5")
    made_up.missing = "train-adam"
    done = run_line("bench", "--gate", path)
    assert done.returncode == 1
    assert "missing: 8x200k-zipf train-adam is in the baseline" in done.stdout
    assert "measured any more: it is gone" in done.stdout


def test_what_cannot_be_measured_is_left_out_of_a_baseline(run_line, tmp_path, made_up, small_build):
    path = tmp_path / "b.json"
    made_up.missing = "train-adam"
    done = run_line(*LINE, "--write-baseline", path, "--rounds", "2")
    assert done.returncode == 0
    assert "left out: 8x200k-zipf train-adam: it is gone" in done.stdout
    assert [row["task"] for row in json.loads(path.read_text())["rows"]] == ["train-sgd"]
    for file in tmp_path.iterdir():
        file.unlink()
    said = refused(run_line(*LINE[:3], *LINE[5:], "--write-baseline", path, "--rounds", "2"))
    assert "nothing could be measured: it is gone" in said
    assert not list(tmp_path.iterdir())


@pytest.fixture
def stranger(tmp_path_factory, monkeypatch):
    """Return the name of an implementation that is not ours."""
    folder = tmp_path_factory.mktemp("stranger")
    module(folder, "gate_stranger", "from keyedopt.reference import *\n")
    monkeypatch.syspath_prepend(folder)
    yield "gate_stranger"
    sys.modules.pop("gate_stranger", None)


def test_an_implementation_that_is_not_ours_is_held_against_a_peer(run_line, tmp_path, made_up, stranger):
    path = tmp_path / "b.json"
    line = ("--implementation", stranger)
    done = run_line(*LINE, *line, "--write-baseline", path, "--rounds", "4")
    assert (done.returncode, done.stderr) == (0, "")
    assert "ratios to peers decide" in " ".join(done.stdout.split())
    assert [file.name for file in tmp_path.iterdir()] == ["b.json"]
    assert baselines.read(path).build is None
    assert made_up.against == [(stranger, "peers")] * 4
    done = run_line("bench", "--gate", path, *line)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ratios to peers decide" in " ".join(done.stdout.split())
    assert made_up.against[4:] == [(stranger, "peers")] * 2
    made_up.slower = math.log(1.25)
    assert run_line("bench", "--gate", path, *line).returncode == 1


def test_a_build_that_was_exchanged_is_not_run(run_line, tmp_path, made_up, small_build, no_processes):
    path = tmp_path / "b.json"
    run_line(*LINE, "--write-baseline", path, "--rounds", "2")
    made_up.against.clear()
    archive = path.parent / baselines.read(path).build["file"]
    archive.write_bytes(builds.packed({"fused": small_build.parent}))
    assert "its SHA-256 is another one" in refused(run_line("bench", "--gate", path))
    archive.unlink()
    assert "cannot be read" in refused(run_line("bench", "--gate", path))
    assert made_up.against == []


def test_a_process_that_breaks_down_is_one_line(run_line, tmp_path, monkeypatch, small_build):
    def broken(*given):
        raise sides.SideError("a process that measures ended with -9")

    monkeypatch.setattr(rounds, "against_peers", broken)
    assert "ended with -9" in refused(run_line(*LINE, "--write-baseline", tmp_path / "b.json"))
    assert not list(tmp_path.iterdir())
    assert "ended with -9" in refused(run_line("bench", "--gate", written(tmp_path)))


def test_too_few_rounds_and_places_that_cannot_be_written_are_refused(run_line, tmp_path, no_processes):
    path = tmp_path / "b.json"
    assert "at least two --rounds" in refused(run_line(*LINE, "--write-baseline", path, "--rounds", "1"))
    path.mkdir()
    assert "cannot be written" in refused(run_line(*LINE, "--write-baseline", path))


def test_limits_can_be_of_more_comparisons_than_are_measured():
    few, many = (gate.change([0.0, 0.01] * 8, [0.05, 0.06], Limits(), count, True) for count in (1, 100))
    assert many.low < few.low
    part = replace(made([CALM] * 3), rows=made([CALM] * 3).rows[1:2])
    assert isinstance(part, Baseline)
    found = judge(part, Machine(1, 0.001), Limits(comparisons=50))
    assert list(found) == [KEYS[1]]
