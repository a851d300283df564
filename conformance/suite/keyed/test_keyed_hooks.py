"""Keyed optimizers: every hook of `torch.optim.Optimizer`."""

import pytest
import torch
import torch.optim.optimizer as torch_hooks

from keyedopt.conformance.suite.support.assertions import expect, expect_bits, expect_equal, outcome
from keyedopt.conformance.suite.support.device import full, ones, zeros
from keyedopt.conformance.suite.support.inputs import parameters, set_grads, sgd, train
from keyedopt.conformance.suite.support.situations import of_state


def stepping(impl):
    """Make a keyed optimizer of a new class with its own step, and return it with its parameters.

    Each call creates a new class, because torch patches a class for hooks only once.
    """

    class Own(impl.KeyedOptimizer):
        def step(self, closure=None):
            self.closure = closure
            for param in self.params.values():
                if param.grad is not None:
                    param.data.sub_(param.grad, alpha=0.1)
                    self.state[param].setdefault("count", 1)
            return closure

    params = parameters(2)
    state = {param: {"m": zeros(3), "count": 1} for param in params.values()}
    return of_state(impl, Own, params, state, [{"params": list(params.values()), "lr": 0.1}]), params


def noting_load(seen, name):
    """Make a load hook that records its name."""

    def hook(optimizer, state_dict=None):
        seen.append(name)

    return hook


@pytest.mark.clause("KEYED-065")
def test_step_hooks_are_called_around_a_step(impl):
    """A pre-hook and a post-hook each run once per step, in order, with the optimizer."""
    optimizer, params = stepping(impl)
    seen = []
    optimizer.register_step_pre_hook(lambda own, args, kwargs: seen.append(("before", own == optimizer)))
    optimizer.register_step_post_hook(lambda own, args, kwargs: seen.append(("after", own == optimizer)))
    set_grads(params)
    optimizer.step()
    expect_equal(seen, [("before", True), ("after", True)], "hooks of the first step")
    optimizer.step()
    expect_equal(len(seen), 4, "calls of hooks in two steps")


@pytest.mark.clause("KEYED-065")
def test_a_step_hook_may_replace_the_arguments(impl):
    """A step receives the arguments that a step pre-hook returns."""
    optimizer, params = stepping(impl)

    def other():
        return 1.0

    given = []
    optimizer.register_step_pre_hook(lambda own, args, kwargs: ((args[0], other), {}))
    optimizer.register_step_post_hook(lambda own, args, kwargs: given.append(own.closure))
    set_grads(params)
    optimizer.step()
    expect(given == [other], "a step with the closure that the hook put in", given)


@pytest.mark.clause("KEYED-065")
def test_a_removed_hook_is_not_called(impl):
    """A hook that was removed through its handle no longer runs."""
    optimizer, params = stepping(impl)
    seen = []
    handle = optimizer.register_step_post_hook(lambda *given: seen.append(1))
    set_grads(params)
    optimizer.step()
    handle.remove()
    optimizer.step()
    expect_equal(len(seen), 1, "calls in a step with and a step without the hook")


@pytest.mark.clause("KEYED-123")
@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_of_all_optimizers(impl, when):
    """A hook for the steps of all optimizers runs once per step of each keyed optimizer."""
    params = parameters(1)
    optimizer, seen = sgd(impl, params), []
    register = getattr(torch_hooks, f"register_optimizer_step_{when}_hook")
    handle = register(lambda own, *_: seen.append(own is optimizer))
    try:
        train(optimizer, params, 2)
    finally:
        handle.remove()
    train(optimizer, params, 1)
    expect_equal(sum(seen), 2, "calls with the keyed optimizer in two steps, and none after the removal")


@pytest.mark.clause("KEYED-066")
@pytest.mark.plain_only("its optimizer is of a class of its own")
def test_a_step_that_calls_its_base_fires_hooks_once(impl):
    """If a subclass's step calls its base class, hooks still run once."""
    first, _ = stepping(impl)
    first.zero_grad(set_to_none=False)  # torch patches the class for hooks here at the latest

    class Sub(type(first)):
        def step(self, closure=None):
            return super().step(closure)

    params = parameters(1)
    groups = [{"params": list(params.values()), "lr": 0.1}]
    optimizer = Sub(params, {params["p0"]: {"count": 1}}, groups)
    seen = []
    optimizer.register_step_pre_hook(lambda *given: seen.append("before"))
    optimizer.register_step_post_hook(lambda *given: seen.append("after"))
    set_grads(params)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    expect_equal(seen, ["before", "after"], "hooks of one step")


@pytest.mark.clause("KEYED-067")
def test_state_dict_hooks(impl):
    """A pre-hook runs before, a post-hook receives the state dict and may replace it; each runs once."""
    optimizer, params = stepping(impl)
    seen = []

    def before(own):
        seen.append("before")
        own.state[params["p0"]]["m"].fill_(4.0)

    def after(own, state_dict):
        seen.append("after")
        return {**state_dict, "version": 3}

    optimizer.register_state_dict_pre_hook(before)
    optimizer.register_state_dict_post_hook(after)
    saved = optimizer.state_dict()
    expect_equal(seen, ["before", "after"], "hooks of one state_dict")
    expect_equal(saved.get("version"), 3, "the entry that the hook added")
    expect_bits(saved["state"]["p0"]["m"], torch.full((3,), 4.0), "what the pre-hook wrote")


@pytest.mark.clause("KEYED-067")
def test_a_state_dict_hook_may_change_in_place(impl):
    """A post-hook that returns None may modify the state dict that it receives."""
    optimizer, _ = stepping(impl)
    optimizer.register_state_dict_post_hook(lambda own, saved: saved.update(version=4))
    expect_equal(optimizer.state_dict().get("version"), 4, "the entry that the hook added")


@pytest.mark.clause("KEYED-068")
def test_load_hooks(impl):
    """A load pre-hook may modify or replace the loaded state; a post-hook runs after the load."""
    optimizer, params = stepping(impl)
    seen = []

    def before(own, state_dict):
        seen.append("before")
        renamed = {key.removeprefix("old."): entry for key, entry in state_dict["state"].items()}
        return {"state": renamed}

    def after(own):
        seen.append(("after", float(own.state[params["p1"]]["m"][0])))

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
    given = {f"old.{key}": {"m": full((3,), 6.0), "count": 1} for key in params}
    optimizer.load_state_dict({"state": given})
    expect_equal(seen, ["before", ("after", 6.0)], "hooks of one load")
    expect_equal(sorted(given), ["old.p0", "old.p1"], "keys of the caller's state dict")


@pytest.mark.clause("KEYED-068")
@pytest.mark.plain_only("its hook replaces all state")
def test_a_load_hook_gets_a_shallow_copy(impl):
    """A load pre-hook that modifies the state dict in place does not modify the caller's."""
    optimizer, params = stepping(impl)

    def before(own, state_dict):
        state_dict["state"] = {key: {"m": ones(3), "count": 1} for key in params}

    optimizer.register_load_state_dict_pre_hook(before)
    given = {"state": {}}
    optimizer.load_state_dict(given)
    expect_equal(given, {"state": {}}, "the caller's state dict")
    expect_bits(optimizer.state[params["p0"]]["m"], torch.ones(3), "what the hook put in")


@pytest.mark.clause("KEYED-069")
def test_no_post_hook_after_a_refused_load(impl):
    """A load that raises does not run the load post-hooks."""
    optimizer, _ = stepping(impl)
    seen = []
    optimizer.register_load_state_dict_post_hook(noting_load(seen, "after"))
    outcome(lambda: optimizer.load_state_dict({"state": {"nobody": {}}}))
    expect_equal(seen, [], "post-hooks after a failed load")


@pytest.mark.clause("KEYED-070")
@pytest.mark.parametrize(
    "event", ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]
)
def test_hooks_run_in_order_and_may_be_put_first(impl, event):
    """Hooks run in the order of registration; hooks with prepend run first."""
    optimizer, _ = stepping(impl)
    seen = []
    register = getattr(optimizer, f"register_{event}_hook")
    register(noting_load(seen, "one"))
    register(noting_load(seen, "two"))
    register(noting_load(seen, "first"), prepend=True)
    saved = optimizer.state_dict()
    if event != "state_dict_pre":  # a load may save the current state
        optimizer.load_state_dict(saved)
    expect_equal(seen, ["first", "one", "two"], "order of the hooks")


@pytest.mark.clause("KEYED-071")
def test_hooks_during_init_state(impl):
    """Observe how often init_state calls the step hooks."""
    optimizer, _ = stepping(impl)
    seen = []
    optimizer.register_step_pre_hook(lambda *given: seen.append("before"))
    optimizer.register_step_post_hook(lambda *given: seen.append("after"))
    optimizer.init_state()
    return seen


@pytest.mark.clause("KEYED-124")
@pytest.mark.parametrize("whose", ["the optimizer", "the inner optimizer"])
def test_pairs_of_hooks_during_init_state(impl, whose):
    """init_state runs the step pre-hooks of an optimizer as often as its step post-hooks."""
    calls: list[str] = []
    params = parameters(1)
    inner = torch.optim.Adam(list(params.values()))
    optimizer = impl.KeyedOptimizerWrapper(params, lambda listed: inner)
    hooked = optimizer if whose == "the optimizer" else inner
    hooked.register_step_pre_hook(lambda *_: calls.append("pre"))
    hooked.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.init_state()
    expect_equal(calls, ["pre", "post"] * (len(calls) // 2), f"step hooks of {whose} in init_state")


@pytest.mark.clause("KEYED-118")
def test_hooks_of_the_inner_optimizer_after_init_state(impl):
    """init_state preserves the step hooks of the inner torch optimizer."""
    calls: list[str] = []
    params = parameters(1)
    inner = torch.optim.Adam(list(params.values()))
    inner.register_step_pre_hook(lambda *_: calls.append("pre"))
    inner.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer = impl.KeyedOptimizerWrapper(params, lambda listed: inner)
    optimizer.init_state()
    calls.clear()
    train(optimizer, params, 1)
    expect_equal(calls, ["pre", "post"], "step hooks that ran in a step")
