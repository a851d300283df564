"""Wrappers and combinations around each other: every layer keeps its function in every order."""

import copy
import itertools
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.device import full
from keyedopt.conformance.suite.support.doubles import recording
from keyedopt.conformance.suite.support.inputs import adam, parameter, set_grads, sgd, train

KINDS = ["plain", "clip", "warmup", "combined"]


def layer(impl: Any, kind: str, inner: Any, level: int) -> Any:
    """Put one more layer around an optimizer; if the implementation lacks the kind, a plain wrapper."""
    if kind == "combined":
        return impl.CombinedOptimizer([(f"k{level}", inner)])
    if kind == "clip" and hasattr(impl, "GradientClippingOptimizer"):
        return impl.GradientClippingOptimizer(inner, impl.GradientClipping.NORM, 0.5)
    if kind == "warmup" and hasattr(impl, "WarmupOptimizer"):
        stages = [impl.WarmupStage(impl.WarmupPolicy.LINEAR, max_iters=8, value=0.25)]
        return impl.WarmupOptimizer(inner, stages, lr=0.5, param_name=f"__warmup{level}")
    return impl.OptimizerWrapper(inner)


def nest(impl: Any, kinds: Any, seed: int = 1) -> tuple[Any, Any, list[Any]]:
    """Build Adam over two parameters with layers around it, the innermost first."""
    params = [parameter(3, seed=seed), parameter(2, 2, seed=seed + 1)]
    inner = adam(impl, {"p": params[0], "q": params[1]})
    outer = inner
    for level, kind in enumerate(kinds):
        outer = layer(impl, kind, outer, level)
    return outer, inner, params


def own_keys(impl: Any, kinds: Any) -> set[str]:
    """Return the keys that a nesting saves: those of the parameters, and one for each schedule."""
    keys = {"p", "q"}
    for level, kind in enumerate(kinds):
        if kind == "combined":
            keys = {f"k{level}.{key}" for key in keys}
        elif kind == "warmup" and hasattr(impl, "WarmupOptimizer"):
            keys = keys | {f"__warmup{level}"}
    return keys


@pytest.mark.clause("WRAP-033")
@pytest.mark.parametrize("outer", KINDS)
@pytest.mark.parametrize("inner", KINDS)
def test_a_resumed_nesting_trains_on_as_the_saved_one(impl, inner, outer):
    """Two layers around an optimizer save their state and resume exactly."""
    kinds = [inner, outer]
    saved, _, params = nest(impl, kinds)
    train(saved, params, 3)
    given = copy.deepcopy(saved.state_dict())
    expect_equal(set(given["state"]), own_keys(impl, kinds), "keys of the saved state")
    fresh, _, others = nest(impl, kinds, seed=5)
    fresh.init_state()
    fresh.load_state_dict(given)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in (saved, fresh)]
    expect_equal(rates[1], rates[0], "learning rates after the load")
    with torch.no_grad():
        for param, other in zip(params, others, strict=True):
            other.copy_(param)
    train(saved, params, 3, seed=9)
    train(fresh, others, 3, seed=9)
    for param, other in zip(params, others, strict=True):
        expect_bits(other, param, "a parameter after three more steps")
    expect_unchanged(snapshot(saved.state_dict()), fresh.state_dict(), "what is saved then")


@pytest.mark.clause("WRAP-033")
@pytest.mark.parametrize(
    "kinds",
    [
        ["combined", "clip", "warmup"],
        ["clip", "combined", "warmup"],
        ["warmup", "clip", "combined"],
        ["warmup", "combined", "clip"],
        ["combined", "plain", "combined", "plain"],
        ["clip", "warmup", "combined", "combined"],
    ],
)
def test_a_deep_nesting_saves_what_its_layers_have(impl, kinds):
    """With three and more layers, the checkpoint is complete and loads."""
    saved, _, params = nest(impl, kinds)
    train(saved, params, 2)
    given = copy.deepcopy(saved.state_dict())
    expect_equal(set(given["state"]), own_keys(impl, kinds), "keys of the saved state")
    fresh, _, _ = nest(impl, kinds, seed=5)
    fresh.init_state()
    fresh.load_state_dict(given)
    expect_unchanged(snapshot(given["state"]), fresh.state_dict()["state"], "the loaded state")


@pytest.mark.clause("WRAP-005")
@pytest.mark.parametrize(
    "around",
    [
        [],
        ["plain"],
        ["clip"],
        ["combined"],
        ["combined", "plain"],
        ["combined", "clip"],
        ["combined", "combined"],
    ],
)
def test_a_schedule_resumes_whatever_it_is_around(impl, around):
    """The entry of a warmup is saved and loaded around any other optimizer."""
    kinds = [*around, "warmup"]
    key = f"__warmup{len(around)}"
    saved, inner, params = nest(impl, kinds)
    train(saved, params, 3)
    state = saved.state_dict()["state"]
    expect(not hasattr(impl, "WarmupOptimizer") or key in state, f"{key} in the checkpoint", set(state))
    rate = inner.param_groups[0]["lr"]
    fresh, resumed, _ = nest(impl, kinds, seed=5)
    fresh.init_state()
    fresh.load_state_dict(copy.deepcopy(saved.state_dict()))
    expect_equal(resumed.param_groups[0]["lr"], rate, "the learning rate after the load")


@pytest.mark.clause("WRAP-005")
def test_the_entries_of_two_wrappers_do_not_shadow_each_other(impl):
    """Two schedules have separate entries, or the second raises."""
    if not hasattr(impl, "WarmupOptimizer"):
        return
    stages = [impl.WarmupStage(impl.WarmupPolicy.CONSTANT, max_iters=9, value=0.5)]
    for names in (("__warmup", "__other"), ("__warmup", "__warmup")):
        param = parameter(2)
        optimizer = adam(impl, {"p": param})
        try:
            for name in names:
                optimizer = impl.WarmupOptimizer(optimizer, stages, lr=1.0, param_name=name)
        except Exception:
            expect(names[0] == names[1], "two schedules of different names", names)
            continue
        train(optimizer, [param], 2)
        keys = set(optimizer.state_dict()["state"])
        count = len(keys - {"p"})
        expect(count == 2, "two entries, or an error where they have one name", keys)


@pytest.mark.clause("WRAP-007")
@pytest.mark.parametrize("outer", ["plain", "combined"])
@pytest.mark.parametrize("inner", ["plain", "combined"])
def test_layers_that_do_nothing_change_nothing(impl, inner, outer):
    """Plain wrappers and combinations do not change steps, bit by bit."""
    nested, optimizer, params = nest(impl, [inner, outer])
    _, alone, others = nest(impl, [])
    train(nested, params, 3)
    train(alone, others, 3)
    for one, other in zip(params, others, strict=True):
        expect_bits(one, other, "a parameter")
        expect_unchanged(snapshot(alone.state[other]), optimizer.state[one], "its state")


@pytest.mark.clause("WRAP-003")
@pytest.mark.parametrize("outer", KINDS)
@pytest.mark.parametrize("inner", KINDS)
def test_every_layer_shows_the_live_groups_and_state(impl, inner, outer):
    """Every layer shows the innermost optimizer's group and state objects."""
    nested, optimizer, params = nest(impl, [inner, outer])
    train(nested, params, 1)
    pairs = itertools.zip_longest(nested.param_groups, optimizer.param_groups)
    expect(all(one is other for one, other in pairs), "the same groups", nested.param_groups)
    for param in params:
        expect(param in nested.state, "the entry of every parameter", list(nested.state))
        shown, live = nested.state[param], optimizer.state[param]
        expect(all(shown[name] is live[name] for name in live), "the live entry", shown)
    expect_equal(len(nested.state), len(nested.state_dict()["state"]), "entries shown, and saved")


@pytest.mark.clause("WRAP-003")
@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_are_replaced_inside_are_shown(impl, kind):
    """After the inner torch optimizer loads, its new groups and state appear."""
    made: list[torch.optim.Optimizer] = []

    def factory(listed: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.Adam(listed, lr=0.5))
        return made[0]

    param = parameter(2)
    nested = layer(impl, kind, impl.OptimizerWrapper(impl.KeyedOptimizerWrapper({"p": param}, factory)), 0)
    train(nested, [param], 1)
    expect(nested.param_groups[0] is made[0].param_groups[0], "the earlier group", nested.param_groups)
    made[0].load_state_dict(copy.deepcopy(made[0].state_dict()))
    expect_equal(len(nested.param_groups), 1, "groups in param_groups")
    expect(nested.param_groups[0] is made[0].param_groups[0], "the same group", nested.param_groups)
    shown, live = nested.state[param], made[0].state[param]
    expect(all(shown[name] is live[name] for name in live), "the live entry", shown)


@pytest.mark.clause("WRAP-008")
@pytest.mark.parametrize("outer", ["plain", "clip", "warmup"])
@pytest.mark.parametrize("inner", ["plain", "clip", "warmup"])
def test_a_closure_reaches_through_all_wrappers(impl, inner, outer):
    """An optimizer inside two wrappers evaluates a closure as often as it needs."""
    param = parameter(2)
    optimizer, recorder = recording(impl, {"p": param}, evaluations=2)
    nested = layer(impl, outer, layer(impl, inner, optimizer, 0), 1)
    made: list[bool] = []

    def closure() -> torch.Tensor:
        made.append(torch.is_grad_enabled())
        nested.zero_grad(set_to_none=True)
        loss = param.sum() * 0.125
        loss.backward()
        return loss

    nested.step(closure)
    expect_equal(made, [True, True], "evaluations, and whether gradients were enabled")
    expect_equal(len(recorder.received), 2, "evaluations that the innermost optimizer saw")
    for received in recorder.received:
        expect_bits(received[0], torch.full((2,), 0.125), "the received gradient")


@pytest.mark.clause("WRAP-018")
@pytest.mark.parametrize("outer", KINDS)
@pytest.mark.parametrize("inner", KINDS)
def test_groups_are_saved_and_loaded_through_all_layers(impl, inner, outer):
    """save_param_groups on the outermost layer reaches the innermost."""
    nested, optimizer, params = nest(impl, [inner, outer])
    nested.save_param_groups(True)
    train(nested, params, 1)
    given = copy.deepcopy(nested.state_dict())
    expect_equal(len(given.get("param_groups", [])), 1, "number of saved groups")
    given["param_groups"][0]["eps"] = 0.125
    nested.load_state_dict(given)
    expect_equal(optimizer.param_groups[0]["eps"], 0.125, "the loaded option")


@pytest.mark.clause("WRAP-012")
@pytest.mark.parametrize("outer", KINDS)
@pytest.mark.parametrize("inner", KINDS)
def test_zero_grad_reaches_through_all_layers(impl, inner, outer):
    """set_to_none=True removes all gradients, through any two layers."""
    nested, _, params = nest(impl, [inner, outer])
    set_grads(params)
    nested.zero_grad(set_to_none=True)
    expect(all(param.grad is None for param in params), "no gradients", [param.grad for param in params])


@pytest.mark.clause("WRAP-016")
@pytest.mark.parametrize("outer", KINDS)
@pytest.mark.parametrize("inner", KINDS)
def test_a_malformed_state_is_refused_through_all_layers(impl, inner, outer):
    """A wrong shape in the last parameter raises ValueError; no write."""
    kinds = [inner, outer]
    nested, _, params = nest(impl, kinds)
    train(nested, params, 2)
    given = copy.deepcopy(nested.state_dict())
    keys = list(given["state"])
    first = next(key for key in keys if key.endswith("p") and "warmup" not in key)
    last = next(key for key in keys if key.endswith("q"))
    given["state"][first]["exp_avg"].fill_(9.0)
    given["state"][last]["exp_avg"] = full((1, 2), 9.0)
    before = snapshot([nested.state_dict(), [group["lr"] for group in nested.param_groups]])
    try:
        nested.load_state_dict(given)
    except ValueError:
        refused = True
    except Exception as error:
        refused = False
        expect(False, "a ValueError", repr(error))
    else:
        refused = False
    now = [nested.state_dict(), [group["lr"] for group in nested.param_groups]]
    expect_unchanged(before, now, "a nesting after a load that raised")
    expect(refused, "a ValueError", "no error")


@pytest.mark.clause("WRAP-019")
@pytest.mark.parametrize("outer", KINDS)
@pytest.mark.parametrize("inner", KINDS)
def test_init_state_reaches_through_all_layers(impl, inner, outer):
    """init_state through two layers initializes state; parameters do not change."""
    nested, optimizer, params = nest(impl, [inner, outer])
    nested.init_state()
    for param in params:
        expect_equal(set(optimizer.state[param]), {"step", "exp_avg", "exp_avg_sq"}, "initialized entries")


@pytest.mark.clause("WRAP-009")
@pytest.mark.plain_only("its optimizer is of a class of its own")
@pytest.mark.parametrize("outer", KINDS)
@pytest.mark.parametrize("inner", KINDS)
def test_a_load_is_told_once_through_all_layers(impl, inner, outer):
    """post_load_state_dict of the innermost optimizer runs once per load."""

    class Told(impl.KeyedOptimizerWrapper):
        calls = 0

        def post_load_state_dict(self):
            self.calls += 1

    param = parameter(2)
    optimizer = Told({"p": param}, torch.optim.Adagrad)
    nested = layer(impl, outer, layer(impl, inner, optimizer, 0), 1)
    train(nested, [param], 1)
    nested.load_state_dict(copy.deepcopy(nested.state_dict()))
    expect_equal(optimizer.calls, 1, "calls in one load")


@pytest.mark.clause("WRAP-024")
@pytest.mark.parametrize("outer", KINDS)
@pytest.mark.parametrize("inner", KINDS)
def test_a_step_count_reaches_through_all_layers(impl, inner, outer):
    """set_optimizer_step reaches the innermost optimizer through any two layers."""

    class Told(impl.KeyedOptimizerWrapper):
        heard: Any = ()

        def set_optimizer_step(self, step):
            self.heard = (*self.heard, step)

    told = Told({"p": parameter(2)}, torch.optim.Adagrad)
    nested = layer(impl, outer, layer(impl, inner, told, 0), 1)
    nested.set_optimizer_step(7)
    expect_equal(told.heard, (7,), "calls that reached the innermost optimizer")


@pytest.mark.clause("WRAP-022")
@pytest.mark.parametrize("kind", ["plain", "clip", "warmup"])
def test_a_group_is_added_through_every_wrapper(impl, kind):
    """A group with keys, added through a wrapper, is trained and saved."""
    param, late = parameter(2, seed=1), parameter(2, seed=2)
    nested = layer(impl, kind, sgd(impl, {"p": param}, momentum=0.9), 0)
    value = late.detach().clone()
    try:
        nested.add_param_group({"params": {"q": late}})
    except (TypeError, ValueError):  # the document does not say how keys are passed
        nested.add_param_group({"params": [("q", late)]})
    train(nested, [param, late], 1)
    expect(not torch.equal(late, value), "a parameter that is trained", late.tolist())
    expect("q" in nested.state_dict()["state"], "its entry in the checkpoint", nested.state_dict())
