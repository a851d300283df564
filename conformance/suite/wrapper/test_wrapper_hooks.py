"""Wrappers: hooks, copies, schedulers and scalers."""

import copy
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
from keyedopt.conformance.suite.support.device import ones, tensor, the_device
from keyedopt.conformance.suite.support.doubles import recording
from keyedopt.conformance.suite.support.inputs import adam, parameter, set_grads, sgd, train
from keyedopt.conformance.suite.support.wrapper import copy_optimizer, count_call, record_load

KINDS = ["plain", "clip", "warmup", "nested"]


def layer(impl: Any, kind: str, inner: Any) -> Any:
    """Put a wrapper around an optimizer; if the implementation lacks the kind, a plain wrapper."""
    if kind == "clip" and hasattr(impl, "GradientClippingOptimizer"):
        return impl.GradientClippingOptimizer(inner, impl.GradientClipping.NORM, 0.5)
    if kind == "warmup" and hasattr(impl, "WarmupOptimizer"):
        stages = [impl.WarmupStage(impl.WarmupPolicy.LINEAR, max_iters=8, value=0.25)]
        return impl.WarmupOptimizer(inner, stages, lr=0.5)
    if kind == "nested":
        return impl.OptimizerWrapper(impl.CombinedOptimizer([("k", impl.OptimizerWrapper(inner))]))
    return impl.OptimizerWrapper(inner)


def build(impl: Any, kind: str, steps: int = 0) -> tuple[Any, Any, Any]:
    """Wrap Adam over one parameter, and train."""
    param = parameter(3, seed=1)
    inner = adam(impl, {"p": param})
    wrapper = layer(impl, kind, inner)
    train(wrapper, [param], steps)
    return wrapper, inner, param


@pytest.mark.clause("WRAP-025")
@pytest.mark.parametrize("kind", KINDS)
def test_step_hooks_run_once_a_step(impl, kind):
    """Step hooks of a wrapper run once per step, before and after it, and can be removed."""
    wrapper, _, param = build(impl, kind)
    calls: list[tuple[str, bool]] = []
    start = param.detach().clone()

    def note(name):
        return lambda optimizer, args, kwargs: calls.append(
            (name, optimizer is wrapper and torch.equal(param, start))
        )

    handles = [wrapper.register_step_pre_hook(note("pre")), wrapper.register_step_post_hook(note("post"))]
    train(wrapper, [param], 1)
    expect_equal(calls, [("pre", True), ("post", False)], "hooks, and whether they ran before the step")
    for handle in handles:
        handle.remove()
    train(wrapper, [param], 1)
    expect_equal(len(calls), 2, "calls after the hooks were removed")


@pytest.mark.clause("WRAP-025")
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_hook_replaces_the_closure(impl, kind):
    """The arguments that a step pre-hook returns replace the given ones."""
    wrapper, _, param = build(impl, kind)
    seen: list[str] = []

    def closure(name):
        def evaluate():
            seen.append(name)
            set_grads([param])
            return 1.0

        return evaluate

    wrapper.register_step_pre_hook(lambda optimizer, args, kwargs: ((optimizer, closure("new")), {}))
    wrapper.step(closure("old"))
    expect_equal(set(seen), {"new"}, "closures that were evaluated")


@pytest.mark.clause("WRAP-026")
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_saving(impl, kind):
    """state_dict hooks of a wrapper run once, and the return value of the post-hook is used."""
    wrapper, _, _ = build(impl, kind, steps=1)
    calls: list[bool] = []
    wrapper.register_state_dict_pre_hook(lambda optimizer: calls.append(optimizer is wrapper))
    wrapper.register_state_dict_post_hook(lambda optimizer, saved: {**saved, "by the hook": 1})
    saved = wrapper.state_dict()
    expect_equal(calls, [True], "calls of the pre-hook")
    expect_equal(saved.get("by the hook"), 1, "what the post-hook added")


@pytest.mark.clause("WRAP-026")
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_loading(impl, kind):
    """load_state_dict hooks of a wrapper run once, and the return value of the pre-hook is loaded."""
    wrapper, inner, param = build(impl, kind, steps=1)
    given = copy.deepcopy(wrapper.state_dict())
    other = copy.deepcopy(given)
    other["state"]["k.p" if kind == "nested" else "p"]["exp_avg"].fill_(9.0)
    calls: list[bool] = []
    wrapper.register_load_state_dict_pre_hook(lambda optimizer, state_dict: other)
    wrapper.register_load_state_dict_post_hook(lambda optimizer: calls.append(optimizer is wrapper))
    wrapper.load_state_dict(given)
    expect_bits(inner.state[param]["exp_avg"], torch.full((3,), 9.0), "exp_avg from the pre-hook")
    expect_equal(calls, [True], "calls of the post-hook")


@pytest.mark.clause("WRAP-027")
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_the_wrapped_optimizer_run(impl, kind):
    """Hooks of the wrapped optimizer run once per step, save or load of a wrapper."""
    wrapper, inner, param = build(impl, kind)
    calls: list[str] = []
    inner.register_step_pre_hook(lambda *_: calls.append("step"))
    inner.register_step_post_hook(lambda *_: calls.append("stepped"))
    train(wrapper, [param], 1)
    expect_equal(calls, ["step", "stepped"], "step hooks that ran")
    inner.register_state_dict_pre_hook(lambda *_: calls.append("save"))
    inner.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    given = copy.deepcopy(wrapper.state_dict())
    expect_equal(calls[2:], ["save", "saved"], "state_dict hooks that ran")
    inner.register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
    inner.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    wrapper.load_state_dict(given)
    loads = [call for call in calls[4:] if call.startswith("load")]
    expect_equal(loads, ["load", "loaded"], "load_state_dict hooks that ran")


@pytest.mark.clause("WRAP-027")
@pytest.mark.parametrize("kind", KINDS)
def test_what_hooks_of_the_wrapped_optimizer_return(impl, kind):
    """Results of the wrapped optimizer's save and load hooks are used."""
    wrapper, inner, param = build(impl, kind, steps=1)
    inner.register_state_dict_post_hook(lambda own, saved: {**saved, "note": 7})
    given = copy.deepcopy(wrapper.state_dict())
    calls: list[object] = []
    record_load(inner, "p", "exp_avg", calls)
    wrapper.load_state_dict(given)
    expect_equal(calls, [7, "loaded 9.0"], "what the load pre-hook got, and what the post-hook found")
    expect_bits(inner.state[param]["exp_avg"], torch.full((3,), 9.0), "what the pre-hook returned")


@pytest.mark.clause("WRAP-027")
def test_hooks_of_every_layer_run(impl):
    """Nested wrappers of one class run the step hooks of each layer once, from outside in."""
    calls: list[str] = []
    param = parameter(3)
    layers = [adam(impl, {"p": param})]
    for _ in range(2):
        layers.append(impl.OptimizerWrapper(layers[-1]))
    for number, one in enumerate(layers):
        one.register_step_pre_hook(lambda *_, number=number: calls.append(f"pre {number}"))
        one.register_step_post_hook(lambda *_, number=number: calls.append(f"post {number}"))
    train(layers[-1], [param], 1)
    expect_equal(calls, ["pre 2", "pre 1", "pre 0", "post 0", "post 1", "post 2"], "step hooks that ran")


@pytest.mark.clause("WRAP-028")
def test_a_step_that_calls_the_base_is_one_event(impl):
    """Hooks of a subclass whose step calls super().step() run once per step."""

    class Logging(impl.OptimizerWrapper):
        def step(self, closure=None):
            return super().step(closure)

    impl.OptimizerWrapper(sgd(impl, {"p": parameter(2)}))  # torch may patch the class at this point
    param = parameter(2)
    optimizer = Logging(sgd(impl, {"p": param}))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(optimizer, [param], 1)
    expect_equal(calls, ["pre", "post"], "hooks that ran in one step")


@pytest.mark.clause("WRAP-029")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_copy_trains_on_alone(impl, how, kind, steps):
    """A copy has the same keys, state and groups, shares nothing, and trains like the original."""
    wrapper, _, param = build(impl, kind, steps)
    wrapper.save_param_groups(True)
    twin, _, same = build(impl, kind, steps)
    twin.save_param_groups(True)
    saved = snapshot(twin.state_dict())
    train(twin, [same], 2, seed=5)
    other = copy_optimizer(wrapper, how)
    expect_unchanged(saved, other.state_dict(), "what the copy saves")
    before = snapshot([param, wrapper.state_dict()])
    copied = other.params["k.p" if kind == "nested" else "p"]
    train(other, [copied], 2, seed=5)
    expect_unchanged(before, [param, wrapper.state_dict()], "the original")
    expect_bits(copied, same, "the parameter of the copy")
    expect_unchanged(snapshot(twin.state_dict()), other.state_dict(), "what the copy saves later")


@pytest.mark.clause("WRAP-029")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_survive_a_copy(impl, how, kind):
    """A copy of a wrapper has its own step hooks, which run once per step."""
    wrapper, _, param = build(impl, kind, steps=1)
    wrapper.register_step_post_hook(count_call)
    other = copy_optimizer(wrapper, how)
    train(other, [other.params["k.p" if kind == "nested" else "p"]], 2)
    expect_equal(getattr(other, "counted", 0), 2, "calls of the copy's hook in two steps")
    expect_equal(getattr(wrapper, "counted", 0), 0, "calls for the original")
    train(wrapper, [param], 1)
    expect_equal((wrapper.counted, other.counted), (1, 2), "calls after a step of the original")


@pytest.mark.clause("WRAP-030")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_does_not_break_the_others(impl, how, kind):
    """After a copy, the original and existing wrappers still step."""
    bystander, _, param = build(impl, kind)
    original, _, other = build(impl, kind)
    copy_optimizer(original, how)
    before = snapshot([param, other])
    train(bystander, [param], 1)
    train(original, [other], 1)
    for value, one in zip(before, (param, other), strict=True):
        expect(not torch.equal(one, value), "a parameter that moved", one.tolist())


@pytest.mark.clause("WRAP-031")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", ["plain", "clip", "nested"])
def test_a_copy_with_a_scheduler_steps_itself(impl, how, kind):
    """A copy of a wrapper with an LRScheduler steps its own parameters."""
    wrapper, _, param = build(impl, kind)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(wrapper, 0.5)
    other = copy_optimizer(wrapper, how)
    copied = other.params["k.p" if kind == "nested" else "p"]
    before = snapshot([param, copied])
    set_grads([param], seed=1)
    set_grads([copied], seed=2)
    other.step()
    expect_bits(param, before[0], "the parameter of the original")
    expect(not torch.equal(copied, before[1]), "a parameter of the copy that moved", copied.tolist())
    expect(scheduler.optimizer is wrapper, "the scheduler of the original", scheduler.optimizer)


@pytest.mark.clause("WRAP-032")
@pytest.mark.parametrize("kind", ["plain", "clip", "nested"])
def test_a_scheduler_sets_the_rate(impl, kind):
    """An LRScheduler around a wrapper sets the learning rate of the wrapped optimizer."""
    param = parameter(2)
    inner, recorder = recording(impl, {"p": param}, lr=1.0)
    wrapper = layer(impl, kind, inner)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(wrapper, 0.5)
    for _ in range(3):
        set_grads([param])
        wrapper.step()
        scheduler.step()
    expect_equal(recorder.rates, [[1.0], [0.5], [0.25]], "learning rates in use")
    expect_equal(scheduler.get_last_lr(), [0.125], "the learning rate that the scheduler reports")


@pytest.mark.clause("WRAP-032")
@pytest.mark.parametrize("kind", ["plain", "warmup", "nested"])
def test_a_scaler_unscales_and_skips(impl, kind):
    """A GradScaler unscales the gradients, and skips a step with infinite ones."""
    param = parameter(2)
    inner, recorder = recording(impl, {"p": param})
    wrapper = layer(impl, kind, inner)
    scaler = torch.amp.GradScaler(the_device().type, init_scale=4.0)
    scaler.scale(ones(1))
    for value in (2.0, float("inf")):
        param.grad = tensor([2.0, value])
        scaler.step(wrapper)
        scaler.update()
    expect_equal(len(recorder.received), 1, "steps taken")
    expect_bits(recorder.received[0][0], torch.full((2,), 0.5), "the unscaled gradient")


@pytest.mark.clause("WRAP-032")
def test_a_scaler_and_clipping_agree(impl):
    """A GradScaler unscales before the step clips, so the inner optimizer gets clipped gradients."""
    if not hasattr(impl, "GradientClippingOptimizer"):
        return
    param = parameter(2)
    inner, recorder = recording(impl, {"p": param})
    wrapper = impl.GradientClippingOptimizer(inner, impl.GradientClipping.VALUE, 0.25)
    scaler = torch.amp.GradScaler(the_device().type, init_scale=4.0)
    scaler.scale(ones(1))
    param.grad = tensor([0.5, 8.0])
    scaler.step(wrapper)
    expect_bits(recorder.received[0][0], torch.tensor([0.125, 0.25]), "the received gradient")
