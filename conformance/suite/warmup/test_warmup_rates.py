"""Warmup: where and when the learning rate is set, and events that do not change it."""

import copy
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    error_of,
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_raises,
    outcome,
)
from keyedopt.conformance.suite.support.device import ones, tensor
from keyedopt.conformance.suite.support.doubles import recording
from keyedopt.conformance.suite.support.inputs import (
    adam,
    parameters,
    set_grads,
    sgd,
    train,
    values,
    warmup_stages,
)
from keyedopt.conformance.suite.support.warmup import (
    POLY_RATES,
    expect_poly_rate,
    poly_ramp,
    schedule_state,
    set_schedule_state,
)


def grouped(impl: Any, listed: Any, groups: Any) -> Any:
    """Make a keyed optimizer with given groups whose step does nothing."""

    def step(self: Any, closure: Any = None) -> None:
        pass

    idle = type("Idle", (impl.KeyedOptimizer,), {"step": step})
    return idle(listed, {}, groups)


@pytest.mark.clause("WARM-027")
def test_rate_of_each_step(impl):
    """The constructor sets the learning rate of iteration 0; step k uses that of iteration k."""
    params = parameters()
    inner, recorder = recording(impl, dict(params), lr=9.0)
    optimizer = poly_ramp(impl, inner)
    expect_poly_rate(optimizer, 0)
    train(optimizer, params, 11)
    for seen, rate in zip(recorder.rates, POLY_RATES, strict=True):
        expect_close(seen[0], rate, "learning rate of the step", ulps=8)


@pytest.mark.clause("WARM-028")
@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize(
    "policy",
    [
        "NONE",
        "LINEAR",
        "CONSTANT",
        "POLY",
        "STEP",
        "COSINE_ANNEALING_WARM_RESTARTS",
        "INTERPOLATE",
    ],
)
def test_training_as_by_hand(impl, dtype, kind, policy):
    """Training with a schedule equals training with the same learning rates set manually."""
    ours, theirs = (parameters(dtype=dtype) for _ in range(2))
    build = {"sgd": sgd, "adam": adam}[kind]
    options = {"momentum": 0.9} if kind == "sgd" else {}
    stage = {"policy": policy, "max_iters": 5, "value": 0.5, "sgdr_period": 3}
    if policy == "INTERPOLATE":  # fields that only this policy has
        stage |= {"start_interpolating_iters": 0, "end_value": 2.0}
    optimizer = impl.WarmupOptimizer(
        build(impl, dict(ours), **options), warmup_stages(impl, [stage]), lr=0.25
    )
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    plain = kinds[kind](list(theirs.values()), lr=0.25, **options)
    for step in range(7):
        plain.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        set_grads(ours, seed=step)
        set_grads(theirs, seed=step)
        optimizer.step()
        plain.step()
        for key in ours:
            expect_bits(ours[key], theirs[key], f"{key} after {step + 1} steps")


@pytest.mark.clause("WARM-029")
def test_lr_param(impl):
    """The schedule sets the option that lr_param names, and no other."""
    params = parameters()
    optimizer = poly_ramp(impl, sgd(impl, dict(params), lr=0.5, momentum=0.9), lr_param="momentum")
    for iteration in range(6):
        expect_poly_rate(optimizer, iteration, "momentum")
        expect_equal(optimizer.param_groups[0]["lr"], 0.5, "lr")
        train(optimizer, params, 1)


@pytest.mark.clause("WARM-030")
def test_every_group(impl):
    """Every group gets the learning rate: with another lr, without one, with a parameter listed twice."""
    params = parameters(3)
    p0, p1, p2 = params.values()
    groups = [{"params": [p0], "lr": 3.0}, {"params": [p1, p2], "lr": 5}, {"params": [p0]}]
    inner = grouped(impl, dict(params), groups)
    optimizer = poly_ramp(impl, inner)
    for iteration in range(6):
        expect_poly_rate(optimizer, iteration)
        expect_poly_rate(inner, iteration)
        optimizer.step()
    without = poly_ramp(impl, grouped(impl, {}, []))
    without.step()


@pytest.mark.clause("WARM-031")
@pytest.mark.parametrize("dtype_of_rate", ["float32", "float64"])
def test_rate_in_a_tensor(impl, dtype_of_rate):
    """A learning rate tensor stays the same tensor and is filled with the scheduled value."""
    params = parameters()
    rate = tensor(9.0, dtype=getattr(torch, dtype_of_rate))
    inner = grouped(impl, dict(params), [{"params": list(params.values()), "lr": rate}])
    optimizer = poly_ramp(impl, inner)
    for iteration in range(6):
        seen = optimizer.param_groups[0]["lr"]
        expect(seen is rate, "the caller's tensor in the group", f"another {type(seen).__name__}")
        expect_close(rate, POLY_RATES[iteration], f"lr at iteration {iteration}", ulps=8)
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    set_schedule_state(impl, state, tensor([2, 0]))
    optimizer.load_state_dict(state)
    expect(optimizer.param_groups[0]["lr"] is rate, "the caller's tensor after a load", "another")
    expect_close(rate, POLY_RATES[2], "lr after a load", ulps=8)


@pytest.mark.plain_only("it counts groups")
@pytest.mark.clause("WARM-032")
@pytest.mark.parametrize("kind", ["plain", "tensor", "wrapped", "combined"])
def test_group_that_comes_later(impl, kind):
    """A group that is added later gets the scheduled learning rate, or adding it raises."""
    params = parameters()
    optimizer = poly_ramp(impl, sgd(impl, dict(params)))
    if kind == "wrapped":
        optimizer = impl.OptimizerWrapper(optimizer)
    elif kind == "combined":
        optimizer = impl.CombinedOptimizer([optimizer])
    train(optimizer, params, 2)
    late = torch.nn.Parameter(ones(2))
    rate = tensor(7.0) if kind == "tensor" else 7.0
    if error_of(lambda: optimizer.add_param_group({"params": {"late": late}, "lr": rate})):
        expect_equal(len(optimizer.param_groups), 1, "groups after an error")
        expect_poly_rate(optimizer, 2)
        return
    expect_equal(len(optimizer.param_groups), 2, "groups")
    expect_poly_rate(optimizer, 2)
    if kind == "tensor":
        expect(optimizer.param_groups[1]["lr"] is rate, "the caller's tensor", "another")
    train(optimizer, [*params.values(), late], 1)
    expect_poly_rate(optimizer, 3)


@pytest.mark.plain_only("it counts groups")
@pytest.mark.clause("WARM-076")
@pytest.mark.parametrize("kind", ["key of the schedule", "known key", "known parameter", "no key"])
def test_group_that_cannot_be(impl, kind):
    """A group with a known key or parameter, or without keys, raises an error."""
    params = parameters()
    optimizer = poly_ramp(impl, sgd(impl, dict(params)))
    train(optimizer, params, 2)
    late = torch.nn.Parameter(ones(2))
    given = {
        "key of the schedule": {"__warmup": late},
        "known key": {"p1": late},
        "known parameter": {"late": params["p1"]},
        "no key": [late],
    }[kind]
    expect_raises(
        lambda: optimizer.add_param_group({"params": given}),
        ValueError,
        NotImplementedError,
        expected=f"an error: {kind}",
    )
    expect_equal(len(optimizer.param_groups), 1, "groups")
    train(optimizer, params, 1)
    expect_poly_rate(optimizer, 3)
    expect_equal(sorted(optimizer.state_dict()["state"]), ["__warmup"], "keys of the state")


@pytest.mark.clause("WARM-033")
@pytest.mark.parametrize("lr", [float("nan"), -0.1], ids=["nan", "negative"])
def test_impossible_lr(impl, lr):
    """A negative or NaN lr raises ValueError, as in torch optimizers."""
    inner = sgd(impl, parameters())
    expect_raises(lambda: poly_ramp(impl, inner, lr=lr), ValueError, expected=f"ValueError for lr={lr}")
    expect_equal(inner.param_groups[0]["lr"], 0.1, "lr of the wrapped optimizer")


@pytest.mark.clause("WARM-034")
def test_step_that_raises(impl):
    """A step that raises does not advance the schedule."""
    params = parameters()
    optimizer = poly_ramp(impl, sgd(impl, dict(params)))
    train(optimizer, params, 2)

    def broken() -> Any:
        raise ArithmeticError("no loss today")

    expect_raises(lambda: optimizer.step(broken), ArithmeticError, expected="the closure's error")
    expect_poly_rate(optimizer, 2)
    expect_equal(schedule_state(impl, optimizer.state_dict()).tolist(), [2, 0], "state")
    train(optimizer, params, 1)
    expect_poly_rate(optimizer, 3)


@pytest.mark.clause("WARM-035")
@pytest.mark.parametrize("evaluations", [1, 3])
def test_closures(impl, evaluations):
    """The inner optimizer evaluates the closure repeatedly; the schedule advances once per step."""
    params = parameters()
    inner, _ = recording(impl, dict(params), evaluations=evaluations)
    optimizer = poly_ramp(impl, inner)
    seen: list[list[Any]] = []

    def closure() -> torch.Tensor:
        seen[-1].append(optimizer.param_groups[0]["lr"])
        expect(torch.is_grad_enabled(), "gradients enabled in the closure", False)
        set_grads(params)
        return tensor(2.5)

    for iteration in range(6):
        seen.append([])
        optimizer.step(closure)
        expect_equal(len(seen[-1]), evaluations, f"evaluations in step {iteration}")
        for rate in seen[-1]:
            expect_close(rate, POLY_RATES[iteration], "learning rate in the closure", ulps=8)
        expect_poly_rate(optimizer, iteration + 1)
    with torch.no_grad():
        seen.append([])
        optimizer.step(closure=closure)
    expect_poly_rate(optimizer, 7)


@pytest.mark.clause("WARM-036")
def test_what_step_returns(impl):
    """Observe what a step with a closure returns."""
    params = parameters()
    optimizer = poly_ramp(impl, sgd(impl, dict(params)))
    return outcome(lambda: optimizer.step(lambda: 2.5))


@pytest.mark.clause("WARM-037")
def test_step_hooks(impl):
    """Step hooks run once per step; pre-hooks see the learning rate that the step uses."""
    params = parameters()
    inner, recorder = recording(impl, dict(params))
    optimizer = poly_ramp(impl, inner)
    before: list[Any] = []
    after: list[Any] = []
    optimizer.register_step_pre_hook(lambda opt, *_: before.append(opt.param_groups[0]["lr"]))
    optimizer.register_step_post_hook(lambda *_: after.append(len(recorder.rates)))
    train(optimizer, params, 5)
    expect_equal(before, [rate[0] for rate in recorder.rates], "learning rates that the hooks before saw")
    expect_equal(after, [1, 2, 3, 4, 5], "steps done when the hooks after ran")


@pytest.mark.clause("WARM-038")
@pytest.mark.parametrize("kind", ["nan", "inf", "none", "sparse", "empty"])
def test_gradients_do_not_matter(impl, kind):
    """The schedule advances equally with non-finite, missing, sparse and empty gradients."""
    params: Any = parameters(2, (0,) if kind == "empty" else (2, 2))
    inner, recorder = recording(impl, dict(params))
    optimizer = poly_ramp(impl, inner)
    for iteration in range(5):
        expect_poly_rate(optimizer, iteration)
        set_grads(params)
        for param in params.values():
            if kind in ("nan", "inf"):
                param.grad.fill_(float(kind))
            elif kind == "none":
                param.grad = None
            elif kind == "sparse":
                param.grad = param.grad.to_sparse(1)
        given = [None if param.grad is None else param.grad.clone() for param in params.values()]
        optimizer.step()
        for seen, expected in zip(recorder.received[-1], given, strict=True):
            if expected is None:
                expect(seen is None, "no gradient", seen)
            else:
                expect_bits(seen, expected, "the received gradient")


@pytest.mark.clause("WARM-039")
def test_only_steps_move_it(impl):
    """Only a step advances the schedule."""
    params = parameters()
    optimizer = poly_ramp(impl, sgd(impl, dict(params)))
    train(optimizer, params, 2)
    before = values(params)
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=True)
    optimizer.state_dict()
    optimizer.post_load_state_dict()
    optimizer.save_param_groups(True)
    optimizer.state_dict()
    optimizer.save_param_groups(False)
    repr(optimizer)
    expect_poly_rate(optimizer, 2)
    for index, expected in enumerate(before):
        expect_bits(list(params.values())[index], expected, f"p{index}")
    train(optimizer, params, 1)
    expect_poly_rate(optimizer, 3)


@pytest.mark.clause("WARM-070")
@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_are_zeroed(impl, to_none):
    """zero_grad sets the wrapped optimizer's gradients to zero, and to None with set_to_none."""
    params = parameters()
    optimizer = poly_ramp(impl, sgd(impl, dict(params)))
    set_grads(params)
    optimizer.zero_grad(set_to_none=to_none)
    for key, param in params.items():
        done = param.grad is None or (not to_none and not param.grad.any())
        expect(done, "gradient None" if to_none else f"gradient of {key} zero", param.grad)
