"""Keyed optimizers: deep copies and pickles."""

import copy
import io

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.inputs import adam, parameters, sgd, train, values


def note_call(optimizer, *given):
    """Count calls on the optimizer itself; a hook that can be pickled."""
    optimizer.calls = getattr(optimizer, "calls", 0) + 1


def copied(optimizer, how):
    """Copy an optimizer with its parameters."""
    if how == "deepcopy":
        return copy.deepcopy(optimizer)
    stream = io.BytesIO()
    torch.save(optimizer, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.clause("KEYED-103")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_trains_on_alike(impl, how, dtype):
    """A copy has the same state, and trains like the original."""
    params = parameters(2, dtype=dtype)
    optimizer = adam(impl, params)
    train(optimizer, params, 3)
    other = copied(optimizer, how)
    expect_equal(list(other.params), ["p0", "p1"], "keys of the copy")
    expect_unchanged(snapshot(optimizer.state_dict()), other.state_dict(), "state of the copy")
    train(optimizer, params, 3, seed=20)
    train(other, other.params, 3, seed=20)
    for key, param in params.items():
        expect_bits(other.params[key], param, f"{key} of the copy after three more steps")


@pytest.mark.clause("KEYED-104")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_independent(impl, how):
    """Training, loading or changing a copy does not affect the original."""
    params = parameters(2)
    optimizer = sgd(impl, params, momentum=0.9)
    train(optimizer, params, 2)
    before, at = snapshot(optimizer.state_dict()), values(params)
    other = copied(optimizer, how)
    train(other, other.params, 2)
    other.param_groups[0]["lr"] = 9.0
    other.save_param_groups(True)
    expect_unchanged(before, optimizer.state_dict(), "state of the original")
    expect_unchanged(at, values(params), "parameters of the original")
    expect_equal(optimizer.param_groups[0]["lr"], 0.1, "learning rate of the original")


@pytest.mark.clause("KEYED-104")
def test_the_state_of_a_copy_is_live(impl):
    """The state dict of a copy contains the tensors that the copy's steps change."""
    params = parameters(1)
    optimizer = sgd(impl, params, momentum=0.9)
    train(optimizer, params, 1)
    other = copied(optimizer, "pickle")
    saved = other.state_dict()["state"]["p0"]["momentum_buffer"]
    train(other, other.params, 1, seed=9)
    expect_bits(saved, other.state[other.params["p0"]]["momentum_buffer"], "the saved tensor")


@pytest.mark.clause("KEYED-105")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_saves_what_the_original_saves(impl, how):
    """A copy saves groups if the original does."""
    params = parameters(1)
    optimizer = sgd(impl, params, lr=0.25)
    optimizer.save_param_groups(True)
    other = copied(optimizer, how)
    other.param_groups[0]["lr"] = 0.5
    saved = other.state_dict()
    expect_equal([group["lr"] for group in saved["param_groups"]], [0.5], "learning rates that are saved")


@pytest.mark.clause("KEYED-106")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_an_optimizer_from_a_lambda_can_be_copied(impl, how):
    """An optimizer whose factory is a lambda can be copied and pickled."""
    params = parameters(1)
    optimizer = impl.KeyedOptimizerWrapper(params, lambda listed: torch.optim.SGD(listed, lr=0.1))
    other = copied(optimizer, how)
    train(optimizer, params, 1)
    train(other, other.params, 1)
    expect_bits(other.params["p0"], params["p0"], "the parameter of the copy")


@pytest.mark.clause("KEYED-107")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_hooks_are_copied(impl, how):
    """Hooks run on the copy once per step; steps of the copy run no hook of the original."""
    params = parameters(1)
    optimizer = sgd(impl, params)
    optimizer.register_step_pre_hook(note_call)
    optimizer.register_step_post_hook(note_call)
    other = copied(optimizer, how)
    train(other, other.params, 1)
    expect_equal(getattr(other, "calls", 0), 2, "calls of the two hooks with the copy")
    expect_equal(getattr(optimizer, "calls", 0), 0, "calls of the hooks with the original")


@pytest.mark.clause("KEYED-107")
@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_copy_that_a_step_hook_made_has_hooks(impl, when):
    """A copy that is made within a step, by a hook, runs its hooks when it steps."""
    copies, ran = [], []
    optimizer = copied(sgd(impl, parameters(1)), "deepcopy")  # hooks that never run are another clause's

    def snap(own, *_):
        if own is optimizer:
            copies.append(copy.deepcopy(own))
        else:
            ran.append(own)

    getattr(optimizer, f"register_step_{when}_hook")(snap)
    train(optimizer, optimizer.params, 1)
    train(copies[0], copies[0].params, 1)
    expect(ran == copies, "one call, with the copy, of the hook", f"{len(ran)} calls")


@pytest.mark.clause("KEYED-108")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_a_scheduled_optimizer_steps_itself(impl, how):
    """With an attached LRScheduler, a copy can be made and trains itself."""
    params = parameters(1)
    optimizer = sgd(impl, params)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    before = values(params)
    other = copied(optimizer, how)
    train(other, other.params, 1)
    expect_bits(params["p0"], before[0], "the parameter of the original")
    expect(not torch.equal(other.params["p0"], before[0]), "a copy that trained", "no change")
