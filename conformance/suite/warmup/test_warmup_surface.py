"""Warmup: names, defaults, and stages, which are validated and never modified."""

import copy
import enum
import inspect
import pickle
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    error_of,
    expect,
    expect_derived,
    expect_equal,
    expect_raises,
    outcome,
)
from keyedopt.conformance.suite.support.inputs import parameters, sgd, train, warmup_stages

NAN, INF = float("nan"), float("inf")


def warmup(impl: Any, stages: Any, **options: Any) -> Any:
    """Make plain SGD that follows a schedule; stages are literals."""
    return impl.WarmupOptimizer(
        sgd(impl, parameters(1, (2,)), lr=9.0), warmup_stages(impl, stages), **options
    )


def rates(optimizer: Any, steps: int) -> list[float]:
    """Take steps; return the learning rate before each."""
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        train(optimizer, optimizer.param_groups[0]["params"], 1)
    return found


def refused(impl: Any, stages: Any) -> None:
    """Expect a constructor that raises for the stages, and does not change the wrapped optimizer."""
    listed = warmup_stages(impl, stages)
    inner = sgd(impl, parameters(1, (2,)), lr=9.0)
    expect_raises(
        lambda: impl.WarmupOptimizer(inner, listed), ValueError, expected=f"ValueError for {stages}"
    )
    expect_equal(inner.param_groups[0]["lr"], 9.0, "lr of the wrapped optimizer")
    expect_equal(list(inner.params), ["p0"], "parameters of the wrapped optimizer")


# --- the surface ----------------------------------------------------------------------------------


@pytest.mark.clause("WARM-001")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CONSTANT", "constant"),
        ("INVSQRT", "inv_sqrt"),
        ("LINEAR", "linear"),
        ("NONE", "none"),
        ("POLY", "poly"),
        ("STEP", "step"),
    ],
)
def test_policies(impl, name, value):
    """WarmupPolicy is an Enum with the documented members and values."""
    expect(issubclass(impl.WarmupPolicy, enum.Enum), "WarmupPolicy an Enum", impl.WarmupPolicy)
    expect_equal(impl.WarmupPolicy[name].value, value, f"value of {name}")
    expect(impl.WarmupPolicy(value) is impl.WarmupPolicy[name], f"{value!r} to give {name}", value)


@pytest.mark.clause("WARM-002")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COSINE_ANNEALING_WARM_RESTARTS", "cosine_annealing_warm_restarts"),
        ("INTERPOLATE", "interpolate"),
    ],
)
def test_later_policies(impl, name, value):
    """WarmupPolicy has the members of the published library."""
    expect_equal(impl.WarmupPolicy[name].value, value, f"value of {name}")


@pytest.mark.clause("WARM-003")
def test_stage_fields(impl):
    """WarmupStage has the documented fields, in order, with the documented defaults."""
    stage = impl.WarmupStage()
    seen = [stage.policy.value, stage.max_iters, stage.value, stage.lr_scale, stage.decay_iters]
    expect_equal(seen, ["linear", 1, 1.0, 1.0, -1], "default fields")
    stage = impl.WarmupStage(impl.WarmupPolicy.POLY, 7, 0.5, 2.0, 3)
    seen = [stage.policy.value, stage.max_iters, stage.value, stage.lr_scale, stage.decay_iters]
    expect_equal(seen, ["poly", 7, 0.5, 2.0, 3], "fields given by position")


@pytest.mark.clause("WARM-004")
def test_later_stage_fields(impl):
    """WarmupStage has the later fields of the published library after the documented ones."""
    stage = impl.WarmupStage()
    seen = [stage.sgdr_period, stage.start_interpolating_iters, stage.end_value]
    expect_equal(seen, [1, None, None], "default fields")
    stage = impl.WarmupStage(impl.WarmupPolicy.POLY, 7, 0.5, 2.0, 3, 4, 5, 0.6)
    seen = [stage.sgdr_period, stage.start_interpolating_iters, stage.end_value]
    expect_equal(seen, [4, 5, 0.6], "fields given by position")


@pytest.mark.clause("WARM-005")
def test_signature(impl):
    """WarmupOptimizer takes optimizer, stages, lr=0.1, lr_param="lr", param_name="__warmup"."""
    taken = inspect.signature(impl.WarmupOptimizer).parameters
    names = ["optimizer", "stages", "lr", "lr_param", "param_name"]
    expect_equal([name for name in taken if name in names], names, "parameters of the constructor")
    defaults = [taken[name].default for name in names[2:]]
    expect_equal(defaults, [0.1, "lr", "__warmup"], "defaults")
    inner = sgd(impl, parameters(1))
    optimizer = impl.WarmupOptimizer(inner, [], 0.5, "momentum", "schedule")
    expect_equal(optimizer.param_groups[0]["momentum"], 0.5, "what lr, lr_param give by position")
    expect("schedule" in optimizer.params, "a parameter 'schedule'", list(optimizer.params))


@pytest.mark.clause("WARM-006")
def test_bases(impl):
    """WarmupOptimizer is an OptimizerWrapper, and therefore a keyed optimizer."""
    for name in ("OptimizerWrapper", "KeyedOptimizer"):
        expect_derived(type(warmup(impl, [])), getattr(impl, name))


@pytest.mark.clause("WARM-007")
def test_stages_in_order(impl):
    """The schedule goes through the stages in order; lr is the learning rate that they adjust."""
    stages = [
        {"policy": "CONSTANT", "max_iters": 2, "value": 0.5},
        {"policy": "CONSTANT", "max_iters": 4, "value": 0.25},
        {"policy": "CONSTANT", "max_iters": 6, "value": 2.0},
    ]
    seen = rates(warmup(impl, stages, lr=0.5), 9)
    order = [rate for index, rate in enumerate(seen) if index == 0 or rate != seen[index - 1]]
    expect_equal(order, [0.25, 0.125, 1.0, 0.5], "learning rates in order")
    expect_equal(rates(warmup(impl, [], lr=0.5), 3), [0.5] * 3, "learning rates without stages")


@pytest.mark.clause("WARM-008")
def test_stages_are_copied_and_pickled(impl):
    """Stages and policies survive copying and pickling; policies keep their identity."""
    stage = impl.WarmupStage(impl.WarmupPolicy.STEP, 7, 0.5, 2.0, 3)
    for twin in (copy.copy(stage), copy.deepcopy(stage), pickle.loads(pickle.dumps(stage))):
        expect(twin == stage, f"an equal stage {stage}", twin)
        expect(twin is not stage, "another stage", "the same")
        expect(twin.policy is impl.WarmupPolicy.STEP, "the member STEP", twin.policy)


@pytest.mark.clause("WARM-009")
def test_stage_assignment(impl):
    """Observe what assigning to a field of a stage does."""

    def assign() -> Any:
        stage = impl.WarmupStage()
        stage.max_iters = 5
        return stage.max_iters

    return outcome(assign)


# --- malformed stages -----------------------------------------------------------------------------


@pytest.mark.clause("WARM-060")
@pytest.mark.parametrize("ends", [[0], [-3], [5, 5], [5, 4], [2, 9, 3], [0, 4]])
def test_stages_must_end_later(impl, ends):
    """A stage that does not end after the previous one raises ValueError."""
    refused(impl, [{"policy": "CONSTANT", "max_iters": end, "value": 0.5} for end in ends])


@pytest.mark.clause("WARM-061")
@pytest.mark.parametrize("policy", ["linear", "LINEAR", None, 3])
def test_policy_that_is_none(impl, policy):
    """A policy that is not a WarmupPolicy raises an error, or is accepted by its name."""

    def make() -> Any:
        stage = impl.WarmupStage(policy=policy, max_iters=10, value=0.5)
        return impl.WarmupOptimizer(sgd(impl, parameters(1, (2,)), lr=9.0), [stage], lr=1.0)

    if error_of(make):
        return
    expected = f"an error for policy={policy!r}, or the schedule LINEAR from 0.5"
    expect(isinstance(policy, str), expected, "no error")
    expect_equal(make().param_groups[0]["lr"], 0.5, f"{expected}: lr")


@pytest.mark.clause("WARM-062")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"start_interpolating_iters": 2},
        {"end_value": 2.0},
        {"start_interpolating_iters": 10, "end_value": 2.0},
        {"start_interpolating_iters": 12, "end_value": 2.0},
    ],
)
def test_interpolate_needs_its_fields(impl, fields):
    """INTERPOLATE without a start before its end, or without end_value, raises ValueError."""
    refused(impl, [{"policy": "INTERPOLATE", "max_iters": 10, "value": 0.1, **fields}])


@pytest.mark.clause("WARM-063")
@pytest.mark.parametrize("period", [0, -4])
@pytest.mark.parametrize("before", [0, 3])
def test_period_must_be_positive(impl, period, before):
    """A restart period that is not positive raises ValueError in the constructor."""
    stage = {"policy": "COSINE_ANNEALING_WARM_RESTARTS", "max_iters": 10, "sgdr_period": period}
    refused(impl, [{"policy": "NONE", "max_iters": before}, stage] if before else [stage])


@pytest.mark.clause("WARM-064")
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("field", ["value", "lr_scale", "end_value"])
def test_values_must_be_finite(impl, field, value):
    """A stage with a NaN or infinite number raises ValueError."""
    fields = {"value": 0.5, "start_interpolating_iters": 1, "end_value": 1.0, field: value}
    refused(impl, [{"policy": "INTERPOLATE", "max_iters": 10, **fields}])


@pytest.mark.clause("WARM-068")
@pytest.mark.parametrize("field", ["max_iters", "value"])
@pytest.mark.parametrize("wrong", [None, "ten"])
def test_numbers_must_be_numbers(impl, field, wrong):
    """A field that is not a number raises an error in the constructor."""
    stages = [{"policy": "LINEAR", "max_iters": 10, field: wrong}]
    expected = f"ValueError or TypeError for {stages}"
    expect_raises(lambda: warmup(impl, stages), ValueError, TypeError, expected=expected)


@pytest.mark.clause("WARM-069")
@pytest.mark.parametrize("kind", ["torch optimizer", "list", "class"])
def test_wrapped_must_be_keyed(impl, kind):
    """Wrapping an object that is not a keyed optimizer raises an error."""
    wrong = {
        "torch optimizer": torch.optim.SGD(list(parameters(1).values()), lr=0.1),
        "list": [sgd(impl, parameters(1))],
        "class": impl.KeyedOptimizer,
    }[kind]
    expect_raises(lambda: impl.WarmupOptimizer(wrong, []), Exception, expected=f"an error for a {kind}")


@pytest.mark.clause("WARM-067")
@pytest.mark.parametrize("kind", ["tuple", "one stage", "max_iters=4.0", "max_iters=2.5", "lr=None"])
def test_unusual_arguments(impl, kind):
    """Observe what unusual arguments of the constructor do: the first learning rates, or the error."""
    ends = {"max_iters=4.0": 4.0, "max_iters=2.5": 2.5}.get(kind, 4)
    stage = impl.WarmupStage(policy=impl.WarmupPolicy.LINEAR, max_iters=ends, value=0.0)
    given = {"tuple": (stage,), "one stage": stage}.get(kind, [stage])
    options = {"lr": None} if kind == "lr=None" else {"lr": 1.0}
    inner = sgd(impl, parameters(1, (2,)))
    return outcome(lambda: rates(impl.WarmupOptimizer(inner, given, **options), 6))


# --- the caller's stages --------------------------------------------------------------------------


@pytest.mark.clause("WARM-065")
@pytest.mark.parametrize("policy", ["LINEAR", "POLY", "STEP", "INTERPOLATE"])
def test_stages_are_not_modified(impl, policy):
    """The stages and their list are not modified and can be reused elsewhere."""
    fields = {"policy": policy, "max_iters": 4, "value": 0.5}
    if policy == "INTERPOLATE":
        fields |= {"start_interpolating_iters": 1, "end_value": 1.0}
    stages = warmup_stages(impl, [fields])
    before = copy.deepcopy(stages)
    first = impl.WarmupOptimizer(sgd(impl, parameters(1, (2,))), stages, lr=1.0)
    rates(first, 8)
    expect(stages == before, f"stages {before}", stages)


@pytest.mark.clause("WARM-066")
@pytest.mark.parametrize("change", ["field", "list"])
def test_later_changes_have_no_effect(impl, change):
    """Changing the list or its stages after construction does not affect the schedule."""
    stages = warmup_stages(impl, [{"policy": "LINEAR", "max_iters": 5, "value": 0.0}])
    optimizer = impl.WarmupOptimizer(sgd(impl, parameters(1, (2,))), stages, lr=1.0)
    if change == "field":
        try:
            stages[0].max_iters = 2
        except AttributeError:
            return  # immutable stages satisfy the clause, too
    else:
        stages[0] = impl.WarmupStage(impl.WarmupPolicy.CONSTANT, 5, 0.5)
        stages.append(impl.WarmupStage(impl.WarmupPolicy.CONSTANT, 7, 0.5))
    expected = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0]
    seen = rates(optimizer, 8)
    close = all(abs(one - other) < 1e-12 for one, other in zip(seen, expected, strict=True))
    expect(close, f"learning rates {expected}", seen)
