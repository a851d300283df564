"""Warmup schedules against the golden curves: policies, stages, boundaries, resuming."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import expect, snapshot
from keyedopt.conformance.suite.support.described import documented_state
from keyedopt.conformance.suite.support.device import tensor
from keyedopt.conformance.suite.support.inputs import parameters, sgd, train, warmup_stages
from keyedopt.conformance.suite.support.measured import Measuring
from keyedopt.conformance.suite.support.warmup import set_schedule_state

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "schedules.json").read_text("utf-8"))


def curves(group: str, *starts: str) -> dict[str, Any]:
    """Select golden curves by the prefix of their name, as arguments of ``parametrize``."""
    chosen = {name: curve for name, curve in GOLDEN[group].items() if name.startswith(starts)}
    return {"argvalues": list(chosen.values()), "ids": list(chosen)}


def scheduled(impl: Any, curve: Any, params: Any) -> Any:
    """Make plain SGD that follows the schedule of a curve."""
    return impl.WarmupOptimizer(
        sgd(impl, dict(params), lr=9.0), warmup_stages(impl, curve["stages"]), lr=curve["lr"]
    )


def consecutive(curve: Any) -> list[Any]:
    """Return the points of a curve at iterations 0, 1, 2, …, before its samples."""
    return [point for index, point in enumerate(curve["points"]) if point[0] == index]


def expect_rate(optimizer: Any, point: Any) -> None:
    """Expect the learning rate of a golden point in every group."""
    iteration, _, rate, tolerance = point
    for group in optimizer.param_groups:
        close = abs(float(group["lr"]) - rate) <= tolerance
        expect(close, f"lr {rate!r} ± {tolerance} at iteration {iteration}", group["lr"])


def follow(impl: Any, curve: Any) -> dict[str, Any]:
    """Train along a curve and expect its learning rate before every step; return the learning rates."""
    params = parameters(1, (2,))
    optimizer = scheduled(impl, curve, params)
    with Measuring({"rates": []}) as measuring:
        for point in consecutive(curve):
            rate = optimizer.param_groups[0]["lr"]
            rate = float(rate) if isinstance(rate, torch.Tensor) else rate
            measuring.record["rates"].append([point[0], rate])
            with measuring.expecting():
                expect_rate(optimizer, point)
            train(optimizer, params, 1)
    return measuring.record


def jump(impl: Any, curve: Any) -> None:
    """Load every point of a curve, in reverse order, and expect its learning rate without a step."""
    optimizer = scheduled(impl, curve, parameters(1, (2,)))
    optimizer.init_state()
    saved = snapshot(optimizer.state_dict())
    for point in reversed(curve["points"]):
        set_schedule_state(impl, saved, tensor(point[:2]))
        optimizer.load_state_dict(snapshot(saved))
        expect_rate(optimizer, point)


# --- the policies ---------------------------------------------------------------------------------


@pytest.mark.clause("WARM-010")
@pytest.mark.parametrize("curve", **curves("plain", "no-stages", "none"))
def test_none(impl, curve):
    """NONE multiplies by 1."""
    return follow(impl, curve)


@pytest.mark.clause("WARM-011")
@pytest.mark.parametrize("curve", **curves("plain", "constant"))
def test_constant(impl, curve):
    """CONSTANT multiplies by value."""
    return follow(impl, curve)


@pytest.mark.clause("WARM-012")
@pytest.mark.parametrize("curve", **curves("plain", "linear", "defaults"))
def test_linear(impl, curve):
    """LINEAR multiplies by value + (1 − value)·i/max_iters."""
    return follow(impl, curve)


@pytest.mark.clause("WARM-013")
@pytest.mark.parametrize("curve", **curves("plain", "poly"))
def test_poly(impl, curve):
    """POLY multiplies by (1 − i/decay_iters)^value."""
    return follow(impl, curve)


@pytest.mark.clause("WARM-014")
@pytest.mark.parametrize("curve", **curves("plain", "step"))
def test_step(impl, curve):
    """STEP multiplies by value^⌊i/decay_iters⌋."""
    return follow(impl, curve)


@pytest.mark.clause("WARM-015")
@pytest.mark.parametrize("curve", **curves("plain", "inv-sqrt"))
def test_inv_sqrt(impl, curve):
    """INVSQRT multiplies by 1/√i."""
    return follow(impl, curve)


@pytest.mark.clause("WARM-016")
@pytest.mark.parametrize("curve", **curves("plain", "cosine"))
def test_cosine(impl, curve):
    """COSINE_ANNEALING_WARM_RESTARTS decreases from 1 to value along a half cosine, and restarts."""
    return follow(impl, curve)


@pytest.mark.clause("WARM-017")
@pytest.mark.parametrize("curve", **curves("plain", "interpolate"))
def test_interpolate(impl, curve):
    """INTERPOLATE goes from value to end_value linearly."""
    return follow(impl, curve)


# --- all policies ---------------------------------------------------------------------------------


@pytest.mark.clause("WARM-018")
@pytest.mark.parametrize(
    "curve",
    **curves("plain", "none-scaled", "linear-down", "poly-root", "step-decay", "inv-sqrt-scaled"),
)
def test_lr_scale(impl, curve):
    """lr_scale multiplies the whole stage."""
    return follow(impl, curve)


@pytest.mark.clause("WARM-019")
@pytest.mark.parametrize("curve", **curves("plain", "poly-decay-0", "poly-later", "step-decay-0"))
def test_decay_iters_not_set(impl, curve):
    """A decay_iters of 0 or less is replaced by max_iters, and by 1 for STEP."""
    return follow(impl, curve)


@pytest.mark.clause("WARM-020")
@pytest.mark.parametrize("curve", **curves("plain", "one-by-one", "every-policy", "linear-twice"))
def test_boundaries(impl, curve):
    """A stage includes max_iters; iterations count from the start of training."""
    return follow(impl, curve)


@pytest.mark.clause("WARM-021")
@pytest.mark.parametrize("curve", **curves("edges", "inv-sqrt"))
def test_inv_sqrt_at_iteration_0(impl, curve):
    """INVSQRT multiplies by 1 at iteration 0."""
    return follow(impl, curve)


@pytest.mark.clause("WARM-022")
@pytest.mark.parametrize("curve", **curves("edges", "poly"))
def test_poly_past_its_decay(impl, curve):
    """POLY stays at 0 after decay_iters."""
    return follow(impl, curve)


@pytest.mark.clause("WARM-023")
@pytest.mark.parametrize("curve", **curves("edges", "interpolate"))
def test_interpolate_before_its_start(impl, curve):
    """INTERPOLATE multiplies by value before its start."""
    return follow(impl, curve)


@pytest.mark.clause("WARM-024")
@pytest.mark.parametrize("curve", **curves("later", "transformer"))
def test_transformer(impl, curve):
    """Observe what a TRANSFORMER stage does, if the policy exists."""
    if "TRANSFORMER" not in impl.WarmupPolicy.__members__:
        return "no such policy"
    optimizer = scheduled(impl, curve, parameters(1, (2,)))
    optimizer.init_state()
    saved = snapshot(optimizer.state_dict())
    rates, wrong = [], []
    for point in curve["points"]:
        set_schedule_state(impl, saved, tensor(point[:2]))
        optimizer.load_state_dict(snapshot(saved))
        rate = float(optimizer.param_groups[0]["lr"])
        rates.append([point[0], rate])
        if abs(rate - point[2]) > point[3]:
            wrong.append(f"{rate!r} instead of {point[2]!r} at iteration {point[0]}")
    formula = "min(s^-0.5, s*warmup_steps^-1.5) with s = i + 1"
    return {"formula": wrong[0] if wrong else formula, "rates": rates}


@pytest.mark.clause("WARM-025")
@pytest.mark.parametrize("curve", **curves("plain", "years", "every-policy", "linear", "cosine"))
def test_any_iteration_in_any_order(impl, curve):
    """The learning rate depends only on the iteration, however large and in any order."""
    jump(impl, curve)


@pytest.mark.clause("WARM-026")
@pytest.mark.parametrize("curve", **curves("plain", ""))
def test_resume_in_the_middle(impl, curve):
    """A fresh optimizer that loads the state continues with the same learning rates, bit by bit."""
    points = consecutive(curve)
    middle = len(points) // 2
    params, others = parameters(1, (2,)), parameters(1, (2,))
    optimizer, resumed = scheduled(impl, curve, params), scheduled(impl, curve, others)
    train(optimizer, params, middle)
    resumed.init_state()
    resumed.load_state_dict(snapshot(optimizer.state_dict()))
    for point in points[middle:]:
        expect_rate(resumed, point)
        seen, same = resumed.param_groups[0]["lr"], optimizer.param_groups[0]["lr"]
        expect(seen == same, f"the same learning rate {same!r} at iteration {point[0]}", seen)
        train(optimizer, params, 1)
        train(resumed, others, 1)


@pytest.mark.clause("WARM-040")
@pytest.mark.parametrize("curve", **curves("plain", "one-by-one", "every-policy", "no-stages"))
def test_state_is_iteration_and_stage(impl, curve):
    """The state is an int64 tensor: the iteration and the number of completed stages."""
    params = parameters(1, (2,))
    optimizer = scheduled(impl, curve, params)
    for iteration, stage, _, _ in consecutive(curve)[1:]:
        train(optimizer, params, 1)
        state = documented_state(impl, "WarmupOptimizer", optimizer.state_dict()["state"]["__warmup"])
        expect("warmup" in state, "an entry 'warmup' in the state", sorted(state))
        state = state["warmup"]
        expect(state.dtype == torch.int64, "a state of dtype int64", state.dtype)
        expect(state.tolist() == [iteration, stage], f"state {[iteration, stage]}", state.tolist())
