"""Warmup around, inside and beside other optimizers: the complete schedule is saved and resumed."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_close,
    expect_equal,
    expect_raises,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.device import tensor, zeros
from keyedopt.conformance.suite.support.inputs import adam, parameters, sgd, train, values, warmup_stages
from keyedopt.conformance.suite.support.warmup import (
    LINEAR_RATES,
    linear_ramp,
    schedule_state,
    set_schedule_state,
)


def clipped(impl: Any, inner: Any) -> Any:
    """Clip an optimizer's gradients to a norm that they have."""
    return impl.GradientClippingOptimizer(inner, impl.GradientClipping.NORM, 0.1)


def build(impl: Any, kind: str, params: Any) -> Any:
    """Build one of many compositions with a schedule, around Adam for p0 and SGD for p1."""
    one = adam(impl, {"p0": params["p0"]})
    two = sgd(impl, {"p1": params["p1"]}, momentum=0.9)
    both = adam(impl, dict(params))
    if kind == "clip(warmup)":
        return clipped(impl, linear_ramp(impl, both))
    if kind == "warmup(clip)":
        return linear_ramp(impl, clipped(impl, both))
    if kind == "wrapper(warmup(wrapper))":
        return impl.OptimizerWrapper(linear_ramp(impl, impl.OptimizerWrapper(both)))
    if kind == "combined(warmup)":
        return impl.CombinedOptimizer([linear_ramp(impl, both)])
    if kind == "combined(warmup, warmup)":
        return impl.CombinedOptimizer([("a", linear_ramp(impl, one)), ("b", linear_ramp(impl, two))])
    if kind == "combined(clip(warmup), clip(warmup))":
        schedules = [
            ("a", clipped(impl, linear_ramp(impl, one))),
            ("b", clipped(impl, linear_ramp(impl, two))),
        ]
        return impl.CombinedOptimizer(schedules)
    if kind == "combined(combined(warmup), warmup)":
        inside = impl.CombinedOptimizer([("c", linear_ramp(impl, one))])
        return impl.CombinedOptimizer([("a", inside), ("b", linear_ramp(impl, two))])
    if kind == "warmup(combined)":
        return linear_ramp(impl, impl.CombinedOptimizer([("a", one), ("b", two)]))
    if kind == "warmup(clip(combined))":
        return linear_ramp(impl, clipped(impl, impl.CombinedOptimizer([one, two])))
    if kind == "clip(warmup(combined))":
        return clipped(impl, linear_ramp(impl, impl.CombinedOptimizer([one, two])))
    assert kind == "combined(warmup(combined))", kind
    return impl.CombinedOptimizer([("a", linear_ramp(impl, impl.CombinedOptimizer([one, two])))])


def schedule_rates(optimizer: Any) -> list[float]:
    """Return the learning rate of every group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def expect_at(optimizer: Any, iteration: int) -> None:
    """Expect every group to have the learning rate of an iteration of the ramp."""
    for rate in schedule_rates(optimizer):
        expect_close(rate, LINEAR_RATES[iteration], f"lr at iteration {iteration}", ulps=8)


def resume(impl: Any, kind: str, steps: int) -> None:
    """Train, load into a fresh composition, and expect both to continue equally."""
    params, others = parameters(), parameters()
    optimizer, resumed = build(impl, kind, params), build(impl, kind, others)
    for iteration in range(steps):
        expect_at(optimizer, iteration)
        train(optimizer, params, 1, seed=iteration)
    resumed.init_state()
    resumed.load_state_dict(snapshot(optimizer.state_dict()))
    for key, param in params.items():
        others[key].data.copy_(param.data)
    for iteration in range(steps, 14):
        expect_at(optimizer, iteration)
        expect_at(resumed, iteration)
        train(optimizer, params, 1, seed=iteration)
        train(resumed, others, 1, seed=iteration)
    expect_unchanged(values(params), values(others), "parameters after resuming")
    expect_unchanged(snapshot(optimizer.state_dict()), resumed.state_dict(), "state after resuming")


@pytest.mark.clause("WARM-050")
@pytest.mark.parametrize("kind", ["clip(warmup)", "warmup(clip)", "wrapper(warmup(wrapper))"])
@pytest.mark.parametrize("steps", [1, 4, 9])
def test_resume_in_wrappers(impl, kind, steps):
    """A schedule resumes exactly, whatever wraps it and whatever it wraps."""
    resume(impl, kind, steps)


@pytest.mark.clause("WARM-051")
@pytest.mark.parametrize(
    "kind",
    [
        "combined(warmup)",
        "combined(warmup, warmup)",
        "combined(clip(warmup), clip(warmup))",
        "combined(combined(warmup), warmup)",
    ],
)
@pytest.mark.parametrize("steps", [1, 9])
def test_resume_inside_combined(impl, kind, steps):
    """Schedules of optimizers that are combined resume exactly."""
    resume(impl, kind, steps)


@pytest.mark.clause("WARM-052")
@pytest.mark.parametrize(
    "kind",
    [
        "warmup(combined)",
        "warmup(clip(combined))",
        "clip(warmup(combined))",
        "combined(warmup(combined))",
    ],
)
@pytest.mark.parametrize("steps", [1, 9])
def test_resume_around_combined(impl, kind, steps):
    """A schedule around a combination is saved with it and resumes exactly."""
    resume(impl, kind, steps)


@pytest.mark.clause("WARM-052")
def test_saved_beside_combined_state(impl):
    """A schedule around a combination saves its state under its own name, beside the others."""
    params = parameters()
    optimizer = build(impl, "warmup(combined)", params)
    train(optimizer, params, 3)
    saved = optimizer.state_dict()["state"]
    expect_equal(set(saved), {"a.p0", "b.p1", "__warmup"}, "keys of the state")
    expect_equal(schedule_state(impl, {"state": saved}).tolist(), [3, 0], "state of the schedule")


@pytest.mark.clause("WARM-051")
def test_names_in_a_combination(impl):
    """In a combination each schedule's state has the prefix of its optimizer."""
    params = parameters()
    optimizer = build(impl, "combined(warmup, warmup)", params)
    train(optimizer, params, 3)
    saved = optimizer.state_dict()["state"]
    expect_equal(set(saved), {"a.p0", "b.p1", "a.__warmup", "b.__warmup"}, "keys of the state")


@pytest.mark.clause("WARM-051")
def test_schedules_side_by_side(impl):
    """Two optimizers with separate schedules keep separate learning rates, also across a load."""

    def make(params: Any) -> Any:
        fast = [{"policy": "LINEAR", "max_iters": 2, "value": 0.0}]
        one = impl.WarmupOptimizer(sgd(impl, {"p0": params["p0"]}), warmup_stages(impl, fast), lr=8.0)
        return impl.CombinedOptimizer([("a", one), ("b", linear_ramp(impl, sgd(impl, {"p1": params["p1"]})))])

    params, others = parameters(), parameters()
    optimizer, resumed = make(params), make(others)
    train(optimizer, params, 1)
    expect_equal(schedule_rates(optimizer), [4.0, 0.25], "rates")
    train(optimizer, params, 2)
    expect_equal(schedule_rates(optimizer), [8.0, 0.75], "rates")
    resumed.init_state()
    resumed.load_state_dict(snapshot(optimizer.state_dict()))
    expect_equal(schedule_rates(resumed), [8.0, 0.75], "learning rates after a load")


@pytest.mark.clause("WARM-053")
@pytest.mark.parametrize("around", ["nothing", "combined", "clip"])
def test_schedule_around_a_schedule(impl, around):
    """Schedules of two options, one around the other, each keep their state and value."""

    def make(params: Any) -> Any:
        second = [{"policy": "CONSTANT", "max_iters": 5, "value": 0.5}]
        optimizer = impl.WarmupOptimizer(
            linear_ramp(impl, sgd(impl, dict(params), momentum=0.9)),
            warmup_stages(impl, second),
            lr=0.5,
            lr_param="momentum",
            param_name="__momentum",
        )
        if around == "combined":
            return impl.CombinedOptimizer([optimizer])
        return clipped(impl, optimizer) if around == "clip" else optimizer

    params, others = parameters(), parameters()
    optimizer, resumed = make(params), make(others)
    for iteration in range(6):
        expect_at(optimizer, iteration)
        expect_equal(next(iter(optimizer.param_groups))["momentum"], 0.25, "momentum")
        train(optimizer, params, 1)
    saved = snapshot(optimizer.state_dict())
    for name in ("__warmup", "__momentum"):
        seen = schedule_state(impl, saved, name).tolist()
        expect_equal(seen, [6, 1], f"state of {name}")
    resumed.init_state()
    resumed.load_state_dict(saved)
    expect_at(resumed, 6)
    expect_equal(next(iter(resumed.param_groups))["momentum"], 0.5, "momentum after a load")
    train(resumed, others, 1)
    expect_at(resumed, 7)


@pytest.mark.clause("WARM-056")
@pytest.mark.parametrize("kind", ["combined(warmup, warmup)", "warmup(combined)"])
def test_refused_load_of_a_combination(impl, kind):
    """If one member rejects a load, no schedule changes."""
    params = parameters()
    optimizer = build(impl, kind, params)
    train(optimizer, params, 3)
    saved = snapshot(optimizer.state_dict())
    saved["state"]["b.p1"]["momentum_buffer"] = zeros(7)
    for key in saved["state"]:
        if key.endswith("__warmup"):
            set_schedule_state(impl, saved, tensor([9, 1]), key)
    expect_raises(lambda: optimizer.load_state_dict(saved), Exception, expected="an error")
    expect_at(optimizer, 3)
    train(optimizer, params, 1)
    expect_at(optimizer, 4)


@pytest.mark.clause("WARM-074")
def test_wrapped_optimizer_stays_in_reach(impl):
    """The schedule and the wrapped optimizer show the same learning rates and state."""
    params = parameters()
    inner = sgd(impl, dict(params), momentum=0.9)
    optimizer = linear_ramp(impl, inner)
    train(optimizer, params, 3)
    expect(optimizer.param_groups[0] is inner.param_groups[0], "the same group", "another")
    for key, param in params.items():
        expect(optimizer.params[key] is param, f"the same parameter {key}", "another")
        same = optimizer.state[param]["momentum_buffer"] is inner.state[param]["momentum_buffer"]
        expect(same, f"the same state of {key}", "another")


@pytest.mark.clause("WARM-074")
def test_torch_optimizer_that_loads_by_itself(impl):
    """A torch optimizer that loads its own state dict continues under the schedule."""
    params = parameters()
    plain = torch.optim.SGD(list(params.values()), lr=0.5)
    optimizer = linear_ramp(impl, impl.KeyedOptimizerWrapper(dict(params), lambda _: plain))
    saved = plain.state_dict()
    train(optimizer, params, 1)
    plain.load_state_dict(saved)
    train(optimizer, params, 2)
    expect_close(plain.param_groups[0]["lr"], LINEAR_RATES[3], "learning rate of the torch optimizer", ulps=8)


@pytest.mark.clause("WARM-053")
def test_the_outer_schedule_has_the_last_word(impl):
    """If two schedules set one option, the outer one's value is used."""

    def make(params: Any) -> Any:
        inner = linear_ramp(impl, sgd(impl, dict(params)), param_name="__inner")
        stages = warmup_stages(impl, [{"policy": "CONSTANT", "max_iters": 20, "value": 0.5}])
        return impl.WarmupOptimizer(inner, stages, lr=0.5)

    params, others = parameters(), parameters()
    optimizer, resumed = make(params), make(others)
    for _ in range(3):
        expect_equal(optimizer.param_groups[0]["lr"], 0.25, "rate")
        train(optimizer, params, 1)
    resumed.init_state()
    resumed.load_state_dict(snapshot(optimizer.state_dict()))
    expect_equal(resumed.param_groups[0]["lr"], 0.25, "learning rate after a load")
    train(resumed, others, 1)
    expect_equal(resumed.param_groups[0]["lr"], 0.25, "learning rate after a step")
