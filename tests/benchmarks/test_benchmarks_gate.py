"""The gate: its verdicts on made-up rounds, and the command."""

import math
from pathlib import Path

import numpy as np
import pytest
from making import refused, valid

from keyedopt.benchmarks import ab_round, build_process, commit_builds, gate
from keyedopt.benchmarks.ab_round import Measured, Request
from keyedopt.benchmarks.build_process import ProcessError
from keyedopt.benchmarks.gate import GateError, Limits, judge

KEYS = [("8x200k-zipf", task) for task in ("train-sgd", "train-adam", "train-adagrad")]
#: Rounds of the noise floor that are nearly equal.
CALM = [0.0, 0.001, -0.001, 0.0] * 2


def noise_of(slowdowns, keys=KEYS):
    return dict(zip(keys, slowdowns, strict=True))


def measured(key, slowdown):
    return Measured(key, (1.0, math.exp(slowdown)))


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
        return [measured(key, self.slowdown(key)) for key in wanted]

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
        return [measured(key, value if key == KEYS[0] else 0.0) for key in wanted]

    return measure


def trial(seed, slower=None, spread=0.02, off=0.0):
    keys = [("work", f"task {number}") for number in range(9)]
    machine = Machine(seed, spread, off=off)
    noise = noise_of([[machine.slowdown(key) for _ in range(8)] for key in keys], keys)
    machine.slower = {keys[0]: slower} if slower else {}
    found = judge(noise, machine)
    return [key for key, change in found.items() if change.verdict == "worse"], keys[0]


@pytest.mark.parametrize("off", [0.0, 0.02])
def test_a_planted_tenth_is_found_and_nothing_else(off):
    found = [trial(seed, 0.10, off=off) for seed in range(20)]
    assert sum(alarms == [key] for alarms, key in found) >= 19


@pytest.mark.parametrize(("spread", "off"), [(0.01, 0.0), (0.01, 0.02), (0.03, 0.02)])
def test_nothing_is_found_where_nothing_changed(spread, off):
    assert sum(bool(trial(seed, None, spread, off)[0]) for seed in range(20)) <= 1


@pytest.mark.parametrize("before", [CALM, [*CALM[:7], 0.3], [*CALM[:7], -0.3]], ids=["calm", "up", "down"])
@pytest.mark.parametrize("place", range(5))
def test_a_round_that_is_off_raises_no_alarm(before, place):
    rows = [0.002, -0.002, 0.001, -0.001, 0.0]
    rows[place] = 0.35
    found = judge(noise_of([before, CALM, CALM]), given(*rows, *[0.0] * 7))
    assert {change.verdict for change in found.values()} == {"fine"}


@pytest.mark.parametrize("place", range(5))
def test_a_round_that_is_off_hides_nothing(place):
    rows = [0.101, 0.099, 0.1, 0.098, 0.102, *[0.1] * 7]
    rows[place] = -0.25
    found = judge(noise_of([CALM] * 3), given(*rows))
    assert found[KEYS[0]].verdict == "worse"
    assert found[KEYS[0]].value == pytest.approx(0.105, abs=0.005)


def test_two_rounds_of_five_that_are_off_raise_no_alarm():
    found = judge(noise_of([CALM] * 3), given(0.3, 0.0, 0.2, 0.001, -0.001, *[0.0] * 7))
    assert found[KEYS[0]].verdict == "fine"


def test_an_alarm_takes_more_rounds_and_only_what_is_open_is_measured_again():
    machine = Machine(1, 0.001, {KEYS[1]: 0.2})
    found = judge(noise_of([CALM] * 3), machine)
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
    cut = 3 * 1.4826 * 0.01
    spread = math.sqrt((4 * 0.01**2 + 0.03**2 + cut**2) / 6)
    reach = gate.student(1 - 0.05 / 9, 6) * spread * math.sqrt(math.pi / 2 / 3)
    change = gate.change(before, now, limits, 3)
    assert math.log1p(change.value) == pytest.approx(0.06)
    assert math.log1p(change.low) == pytest.approx(0.06 - reach)
    assert math.log1p(change.high) == pytest.approx(0.06 + reach)


def test_a_change_below_the_tolerance_is_no_alarm_however_sure_it_is():
    found = judge(noise_of([CALM] * 3), Machine(1, 0.0001, {KEYS[0]: 0.03}))
    assert {change.verdict for change in found.values()} == {"fine"}


def test_what_got_faster_is_no_alarm():
    found = judge(noise_of([CALM] * 3), Machine(1, 0.001, {KEYS[0]: -0.5}))
    assert found[KEYS[0]].verdict == "fine"


def test_what_stays_undecided_is_unclear_and_no_alarm():
    found = judge(noise_of([[0.6, -0.6] * 3] * 3), Machine(1, 0.5), Limits(most=3))
    assert {change.verdict for change in found.values()} == {"unclear"}
    assert {change.rounds for change in found.values()} == {3}


def test_the_spread_of_rounds_is_never_taken_for_nothing():
    narrow, wide = (gate.change([0.0] * 8, [0.0] * 2, Limits(floor=floor), 1) for floor in (0.01, 0.1))
    assert 0 < narrow.high < wide.high


def test_what_cannot_be_measured_any_more_is_missing():
    found = judge(noise_of([CALM] * 3), lambda wanted: [Measured(KEYS[0], None, "no Adam")])
    assert {change.verdict for change in found.values()} == {"missing"}
    assert found[KEYS[0]].why == "no Adam"


def test_limits_can_be_of_more_comparisons_than_are_measured():
    few, many = (gate.change([0.0, 0.01] * 8, [0.05, 0.06], Limits(), count) for count in (1, 100))
    assert many.low < few.low
    found = judge({KEYS[1]: CALM}, Machine(1, 0.001), Limits(comparisons=50))
    assert list(found) == [KEYS[1]]


# --- the noise floor, and the command -------------------------------------------------------------


class Rounds:
    """Rounds that take no time: which trees they were asked for, and made-up slowdowns."""

    def __init__(self, monkeypatch):
        self.slower, self.missing_in, self.asked = 0.0, (), []
        monkeypatch.setattr(ab_round, "measure", self.measure)

    def measure(self, request, wanted, **_):
        self.asked.append((*map(str, request.trees), *request.targets, request.threads, list(wanted)))
        wobble = 0.001 * (len(self.asked) % 3)
        same = request.trees[0] == request.trees[1]
        for key in wanted:
            if key[1] == "train-adam" and ("base" if same else "checkout") in self.missing_in:
                yield Measured(key, None, "it is gone")
            else:
                yield measured(key, wobble + (self.slower if key[1] == "train-sgd" and not same else 0.0))


@pytest.fixture
def made_up(monkeypatch):
    return Rounds(monkeypatch)


@pytest.fixture
def two_builds(monkeypatch, tmp_path):
    """Let builds take no time: the folder of a commit has the name of its ref."""

    class Built:
        def __init__(self, root, commits, progress):
            self.trees = {commit: Path(commit) for commit in commits}

        def __enter__(self):
            return self.trees

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(commit_builds, "repository_root", lambda at: tmp_path)
    monkeypatch.setattr(commit_builds, "resolve", lambda ref, root: ref)
    monkeypatch.setattr(commit_builds, "commit_of_checkout", lambda root: "checkout")
    monkeypatch.setattr(commit_builds, "built_commits", Built)


REQUEST = Request((Path("base"), Path("checkout")), ("fused", "planted"))


def test_the_noise_floor_is_of_the_base_against_itself(made_up):
    noise, left_out = gate.noise_floor(REQUEST, KEYS, rounds=4)
    assert [one[:5] for one in made_up.asked] == [("base", "base", "fused", "fused", 1)] * 4
    assert {len(each) for each in noise.values()} == {4}
    assert left_out == {}


def test_a_task_that_the_base_cannot_do_is_left_out(made_up):
    made_up.missing_in = ("base",)
    noise, left_out = gate.noise_floor(REQUEST, KEYS, rounds=3)
    assert list(noise) == [KEYS[0], KEYS[2]]
    assert left_out == {KEYS[1]: "it is gone"}
    assert [len(one[5]) for one in made_up.asked] == [3, 2, 2]
    with pytest.raises(GateError, match="nothing can be measured: it is gone"):
        gate.noise_floor(REQUEST, KEYS[1:2])


LINE = ("bench", "gate", "base", "--workload", "8x200k-zipf", "--task", "train-sgd", "--task", "train-adam")


@pytest.mark.usefixtures("two_builds")
def test_the_gate_measures_both_builds(run_line, made_up):
    done = run_line(*LINE, "--rounds", "5", "--threads", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert [one[:5] for one in made_up.asked] == [
        *[("base", "base", "fused", "fused", 2)] * 5,
        *[("base", "checkout", "fused", "fused", 2)] * 2,
    ]
    assert "2 comparisons, 0 worse or missing, 0 unclear" in done.stdout


@pytest.mark.usefixtures("two_builds")
def test_the_gate_names_what_got_worse(run_line, made_up):
    made_up.slower = math.log(1.25)
    done = run_line(*LINE)
    assert done.returncode == 1
    assert "worse: 8x200k-zipf train-sgd takes 25% longer than in the base" in done.stdout
    assert "2 comparisons, 1 worse" in done.stdout


@pytest.mark.usefixtures("two_builds")
def test_the_gate_names_what_is_missing(run_line, made_up, tmp_path):
    made_up.missing_in = ("checkout",)
    done = run_line(*LINE, "--output", "new/gate.json")
    assert done.returncode == 1
    assert "missing: 8x200k-zipf train-adam can be measured in the base" in done.stdout
    assert "not in the checkout: it is gone" in done.stdout
    written = valid(tmp_path / "new" / "gate.json")
    row = next(row for row in written["rows"] if row["task"] == "train-adam")
    assert (row["verdict"], row["why"], row["value"]) == ("missing", "it is gone", None)


@pytest.mark.usefixtures("two_builds")
def test_the_gate_names_what_the_base_cannot_do(run_line, made_up, tmp_path):
    made_up.missing_in = ("base",)
    done = run_line(*LINE, "--output", "gate.json")
    assert done.returncode == 0
    assert "left out: 8x200k-zipf train-adam: it is gone" in done.stdout
    written = valid(tmp_path / "gate.json")
    assert (written["kind"], written["schema"]) == ("keyedopt-gate", 2)
    assert (written["base"], written["checkout"]) == ({"ref": "base", "commit": "base"}, "checkout")
    (row,) = written["rows"]
    assert (row["workload"], row["task"], row["verdict"]) == ("8x200k-zipf", "train-sgd", "fine")
    assert row["low"] <= row["value"] <= row["high"]
    assert len(row["noise"]) == 8
    assert written["left_out"] == [{"workload": "8x200k-zipf", "task": "train-adam", "why": "it is gone"}]


@pytest.mark.usefixtures("two_builds")
def test_a_process_that_breaks_down_is_one_line(run_line, monkeypatch, tmp_path):
    def broken(*_, **__):
        raise ProcessError("a measuring process ended with -9")

    monkeypatch.setattr(ab_round, "measure", broken)
    assert "ended with -9" in refused(run_line(*LINE, "--output", "gate.json"))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("two_builds")
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_built(run_line, tmp_path, monkeypatch):
    monkeypatch.setattr(commit_builds, "built_commits", lambda *_: 1 / 0)
    monkeypatch.setattr(build_process, "BuildProcess", lambda *_: 1 / 0)
    (tmp_path / "folder").mkdir()
    assert "cannot be written" in refused(run_line(*LINE, "--output", "folder"))
