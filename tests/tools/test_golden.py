"""Golden data is what its script makes, and the reference follows it, later policies too."""

import json

import pytest

from keyedopt.reference import schedule, warmup
from keyedopt.reference.stages import validated
from keyedopt.tools.golden import make_schedules

GOLDEN = json.loads(make_schedules.DATA.read_text(encoding="utf-8"))
CURVES = {
    f"{group}-{name}": curve for group in ("plain", "edges", "later") for name, curve in GOLDEN[group].items()
}


def test_the_stored_schedules_are_what_the_script_makes():
    assert make_schedules.DATA.read_text(encoding="utf-8") == make_schedules.text()


def test_every_policy_has_a_golden_curve():
    drawn = {stage["policy"] for curve in CURVES.values() for stage in curve["stages"]}
    assert drawn == set(warmup.WarmupPolicy.__members__)


@pytest.mark.parametrize("name", CURVES)
def test_the_reference_follows_the_golden_curves(name):
    curve = CURVES[name]
    stages = validated(
        warmup.WarmupStage(**{**stage, "policy": warmup.WarmupPolicy[stage["policy"]]})
        for stage in curve["stages"]
    )
    for iteration, stage, rate, tolerance in curve["points"]:
        assert schedule.stage_of(stages, iteration) == stage
        assert abs(curve["lr"] * schedule.multiplier(stages, iteration) - rate) <= tolerance


def test_curves_begin_at_0_and_go_well_past_their_last_stage():
    for curve in CURVES.values():
        iterations = [point[0] for point in curve["points"]]
        assert iterations[0] == 0
        assert iterations == sorted(set(iterations))
        assert iterations[-1] > max([stage.get("max_iters", 1) for stage in curve["stages"]], default=0)
