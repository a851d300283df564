"""Combined optimizers: hooks, copies, schedulers and scalers."""

import copy

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.combined import combined_pair
from keyedopt.conformance.suite.support.device import full, ones, the_device
from keyedopt.conformance.suite.support.doubles import recording
from keyedopt.conformance.suite.support.inputs import parameter, set_grads, sgd, train
from keyedopt.conformance.suite.support.wrapper import copy_optimizer, count_call, record_load


@pytest.mark.clause("COMB-035")
def test_step_hooks_run_once_a_step(impl):
    """Step hooks of a combination run once per step, before and after it, and can be removed."""
    combined, _, params = combined_pair(impl)
    calls: list[tuple[str, bool]] = []
    start = params[0].detach().clone()

    def note(name):
        return lambda optimizer, args, kwargs: calls.append(
            (name, optimizer is combined and torch.equal(params[0], start))
        )

    handles = [combined.register_step_pre_hook(note("pre")), combined.register_step_post_hook(note("post"))]
    set_grads(params)
    combined.step()
    expect_equal(calls, [("pre", True), ("post", False)], "hooks, and whether they ran before the step")
    for handle in handles:
        handle.remove()
    combined.step()
    expect_equal(len(calls), 2, "calls after the hooks were removed")


@pytest.mark.clause("COMB-035")
def test_a_step_hook_replaces_the_closure(impl):
    """The arguments that a step pre-hook returns replace the given ones."""
    combined, _, params = combined_pair(impl)
    seen: list[str] = []

    def closure(name):
        def evaluate():
            seen.append(name)
            set_grads(params)
            return 1.0

        return evaluate

    combined.register_step_pre_hook(lambda optimizer, args, kwargs: ((optimizer, closure("new")), {}))
    combined.step(closure("old"))
    expect_equal(set(seen), {"new"}, "closures that were evaluated")


@pytest.mark.clause("COMB-043")
def test_a_step_that_calls_the_base_is_one_event(impl):
    """Hooks of a subclass whose step calls super().step() run once per step."""

    class Logging(impl.CombinedOptimizer):
        def step(self, closure=None):
            return super().step(closure)

    combined_pair(impl)  # torch may prepare the class at its first instance
    param = parameter(2)
    optimizer = Logging([sgd(impl, {"p": param})])
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(optimizer, [param], 1)
    expect_equal(calls, ["pre", "post"], "hooks that ran in one step")


@pytest.mark.clause("COMB-036")
def test_step_hooks_of_the_combined_optimizers_run(impl):
    """A step hook of a combined optimizer runs once per step of the combination."""
    combined, inner, params = combined_pair(impl)
    calls: list[str] = []
    for name, optimizer in zip("ab", inner, strict=True):
        optimizer.register_step_pre_hook(lambda *_, name=name: calls.append(f"pre {name}"))
        optimizer.register_step_post_hook(lambda *_, name=name: calls.append(f"post {name}"))
    train(combined, params, 1)
    expect_equal(calls, ["pre a", "post a", "pre b", "post b"], "hooks that ran")


@pytest.mark.clause("COMB-037")
def test_hooks_of_saving(impl):
    """state_dict hooks of a combination run once, and the return value of the post-hook is used."""
    combined, _, _ = combined_pair(impl, steps=1)
    calls: list[bool] = []
    combined.register_state_dict_pre_hook(lambda optimizer: calls.append(optimizer is combined))
    combined.register_state_dict_post_hook(lambda optimizer, saved: {**saved, "by the hook": 1})
    saved = combined.state_dict()
    expect_equal(calls, [True], "calls of the pre-hook")
    expect_equal(saved.get("by the hook"), 1, "what the post-hook added")


@pytest.mark.clause("COMB-037")
def test_hooks_of_loading(impl):
    """load_state_dict hooks of a combination run once, and the return value of the pre-hook is loaded."""
    combined, inner, params = combined_pair(impl, steps=1)
    given = copy.deepcopy(combined.state_dict())
    other = copy.deepcopy(given)
    other["state"]["a.p"]["exp_avg"].fill_(9.0)
    calls: list[bool] = []
    combined.register_load_state_dict_pre_hook(lambda optimizer, state_dict: other)
    combined.register_load_state_dict_post_hook(lambda optimizer: calls.append(optimizer is combined))
    combined.load_state_dict(given)
    expect_bits(inner[0].state[params[0]]["exp_avg"], torch.full((3,), 9.0), "exp_avg from the pre-hook")
    expect_equal(calls, [True], "calls of the post-hook")


@pytest.mark.clause("COMB-044")
def test_hooks_of_saving_and_loading_on_one_of_them(impl):
    """Save and load hooks of one optimizer run once; their results are used and loaded."""
    combined, inner, params = combined_pair(impl, steps=1)
    calls: list[object] = []
    inner[0].register_state_dict_pre_hook(lambda own: calls.append("save"))
    inner[0].register_state_dict_post_hook(lambda own, saved: {**saved, "note": 7})
    given = copy.deepcopy(combined.state_dict())
    expect_equal(calls, ["save"], "calls of the state_dict pre-hook")
    calls.clear()
    record_load(inner[0], "p", "exp_avg", calls)
    combined.load_state_dict(given)
    loads = [call for call in calls if call != "save"]  # a load may look at what is there
    expect_equal(loads, [7, "loaded 9.0"], "what the load pre-hook got, and what the post-hook found")
    expect_bits(inner[0].state[params[0]]["exp_avg"], torch.full((3,), 9.0), "what the pre-hook returned")


@pytest.mark.clause("COMB-038")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_hooks_survive_a_copy(impl, how):
    """A copy has its own step hooks, which run once per step."""
    combined, _, params = combined_pair(impl, steps=1)
    combined.register_step_post_hook(count_call)
    other = copy_optimizer(combined, how)
    train(other, other.params, 2)
    expect_equal(getattr(other, "counted", 0), 2, "calls of the copy's hook in two steps")
    expect_equal(getattr(combined, "counted", 0), 0, "calls for the original")
    train(combined, params, 1)
    expect_equal((combined.counted, other.counted), (1, 2), "calls after a step of the original")


@pytest.mark.clause("COMB-039")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_copy_trains_on_alone(impl, how, steps):
    """A copy has the same keys, state and groups, shares nothing, and trains like the original."""
    combined, _, params = combined_pair(impl, steps=steps)
    combined.save_param_groups(True)
    other = copy_optimizer(combined, how)
    expect_unchanged(snapshot(combined.state_dict()), other.state_dict(), "what the copy saves")
    before = snapshot([params, combined.state_dict()])
    copied = [other.params[key] for key in ("a.p", "b.p")]
    train(other, copied, 2, seed=5)
    expect_unchanged(before, [params, combined.state_dict()], "the original")
    train(combined, params, 2, seed=5)
    for param, one in zip(params, copied, strict=True):
        expect_bits(one, param, "a parameter of the copy")
    expect_unchanged(snapshot(combined.state_dict()), other.state_dict(), "what the copy saves later")
    other.load_state_dict(combined.state_dict())


@pytest.mark.clause("COMB-040")
def test_a_copy_with_a_scheduler_steps_itself(impl):
    """A copy of a combination with an LRScheduler steps its own parameters."""
    combined, _, params = combined_pair(impl)
    torch.optim.lr_scheduler.ExponentialLR(combined, 0.5)
    other = copy.deepcopy(combined)
    before = snapshot(params)
    copied = [other.params[key] for key in ("a.p", "b.p")]
    set_grads(params, seed=1)
    set_grads(copied, seed=2)
    other.step()
    expect_unchanged(before, params, "parameters of the original")
    for param, value in zip(copied, before, strict=True):
        expect(not torch.equal(param, value), "a parameter of the copy that moved", param.tolist())


@pytest.mark.clause("COMB-041")
def test_a_scheduler_sets_all_rates(impl):
    """An LRScheduler around a combination sets the learning rate of every optimizer."""
    params = [parameter(2, seed=seed) for seed in range(2)]
    keyed, recorders = zip(*(recording(impl, {"p": param}, lr=1.0) for param in params), strict=True)
    combined = impl.CombinedOptimizer([("a", keyed[0]), ("b", keyed[1])])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(combined, 0.5)
    for _ in range(3):
        set_grads(params)
        combined.step()
        scheduler.step()
    for recorder in recorders:
        expect_equal(recorder.rates, [[1.0], [0.5], [0.25]], "learning rates in use")


@pytest.mark.clause("COMB-041")
def test_a_scaler_unscales_and_skips(impl):
    """A GradScaler unscales the gradients of all optimizers, and skips a step with infinite ones."""
    params = [parameter(2, seed=seed) for seed in range(2)]
    keyed, recorders = zip(*(recording(impl, {"p": param}) for param in params), strict=True)
    combined = impl.CombinedOptimizer([("a", keyed[0]), ("b", keyed[1])])
    scaler = torch.amp.GradScaler(the_device().type, init_scale=4.0)
    scaler.scale(ones(1))
    for param in params:
        param.grad = full((2,), 2.0)
    scaler.step(combined)
    scaler.update()
    for recorder in recorders:
        expect_bits(recorder.received[0][0], torch.full((2,), 0.5), "the unscaled gradient")
    for param in params:
        param.grad = full((2,), 2.0)
    params[1].grad[0] = float("inf")
    scaler.step(combined)
    scaler.update()
    for recorder in recorders:
        expect_equal(len(recorder.received), 1, "steps taken")
