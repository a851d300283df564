"""Fault tolerance: several hooks, and several parameters of which the last one is invalid."""

import functools

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    error_of,
    expect,
    expect_equal,
    expect_raises,
    snapshot,
)
from keyedopt.conformance.suite.support.inputs import parameter, parameters, train
from keyedopt.conformance.suite.support.replicas import ScriptedManager, torch_optimizer


@pytest.mark.clause("FT-027")
@pytest.mark.parametrize(
    "event", ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]
)
def test_every_hook_runs(impl, event):
    """If there are several hooks, each runs, in order."""
    params = parameters()
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager(), torch_optimizer("Adam", params))
    train(optimizer, params, 1)
    seen = []
    for number in range(3):
        getattr(optimizer, f"register_{event}_hook")(lambda *_, number=number: seen.append(number))
    optimizer.load_state_dict(snapshot(optimizer.state_dict()))
    expect_equal(seen, [0, 1, 2], "hooks that ran")


@pytest.mark.clause("FT-017")
@pytest.mark.needs("apply_optimizer_in_backward")
@pytest.mark.parametrize("groups", [1, 2])
def test_the_last_parameter_is_updated_in_the_backward(impl, groups):
    """One parameter that the backward pass updates is enough for an error."""
    params = [parameter(3, seed=index) for index in range(3)]
    impl.apply_optimizer_in_backward(torch.optim.SGD, [params[-1]], {"lr": 0.1})
    listed = [{"params": params[:2]}, {"params": params[2:]}] if groups == 2 else params
    expect_raises(
        lambda: impl.FaultTolerantOptimizer(ScriptedManager(), torch.optim.SGD(listed, lr=0.1)),
        ValueError,
        TypeError,
        RuntimeError,
        NotImplementedError,
        expected="an error",
    )


@pytest.mark.clause("FT-017")
@pytest.mark.needs("apply_optimizer_in_backward", "KeyedOptimizerWrapper")
@pytest.mark.parametrize("place", [0, 1])
def test_a_keyed_group_is_updated_in_the_backward(impl, place):
    """A group that lists a parameter by its key, and that the backward pass updates, raises an error."""
    params = [parameter(3, seed=index) for index in range(3)]
    impl.apply_optimizer_in_backward(torch.optim.SGD, [params[1 + place]], {"lr": 0.1})
    inner = impl.KeyedOptimizerWrapper({"p0": params[0]}, functools.partial(torch.optim.SGD, lr=0.1))
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager([False]), inner)
    added = {f"p{index}": params[index] for index in (1, 2)}
    expect(error_of(lambda: optimizer.add_param_group({"params": added})), "an error", "none")


@pytest.mark.clause("FT-017")
@pytest.mark.needs("apply_optimizer_in_backward")
def test_a_group_of_one_parameter_is_updated_in_the_backward(impl):
    """A group whose parameters are one tensor, which the backward pass updates, raises an error."""
    params = [parameter(3, seed=index) for index in range(2)]
    impl.apply_optimizer_in_backward(torch.optim.SGD, [params[1]], {"lr": 0.1})
    inner = torch.optim.SGD([params[0]], lr=0.1)
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager([False]), inner)
    expect(error_of(lambda: optimizer.add_param_group({"params": params[1]})), "an error", "none")


@pytest.mark.clause("FT-017")
@pytest.mark.needs("apply_optimizer_in_backward")
def test_a_refused_group_is_not_added(impl):
    """A group of parameters that the backward pass updates is added completely, or not at all."""
    params = [parameter(3, seed=index) for index in range(2)]
    impl.apply_optimizer_in_backward(torch.optim.SGD, [params[1]], {"lr": 0.1})
    inner = torch.optim.SGD([params[0]], lr=0.1)
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager([False]), inner)
    refused = error_of(lambda: optimizer.add_param_group({"params": [params[1]]}))
    wanted = 1 if refused else 2
    expect_equal(len(inner.param_groups), wanted, "number of groups of the wrapped optimizer")
    expect_equal(len(optimizer.param_groups), wanted, "number of groups")
