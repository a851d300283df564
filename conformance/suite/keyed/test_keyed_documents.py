"""Keyed optimizers: sentences of the documents about names, gradients, groups and loading."""

import copy

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_derived,
    expect_equal,
    expect_raises,
    expect_unchanged,
)
from keyedopt.conformance.suite.support.device import full, ones
from keyedopt.conformance.suite.support.inputs import (
    adam,
    parameters,
    set_grads,
    set_sparse_grad,
    set_wide_grads,
    sgd,
    train,
    values,
)


@pytest.mark.clause("KEYED-113")
def test_names_of_arguments(impl):
    """Every argument can be given by its documented name."""
    params = parameters(2)
    plain = impl.KeyedOptimizer(param_groups=[{"params": list(params.values())}], state={}, params=params)
    expect_equal(list(plain.params), ["p0", "p1"], "keys of KeyedOptimizer")
    optimizer = impl.KeyedOptimizerWrapper(
        optim_factory=lambda listed: torch.optim.Adam([listed[0]]), params=params
    )
    optimizer.init_state(sparse_grad_parameter_names=None)
    optimizer.save_param_groups(save=True)
    saved = copy.deepcopy(optimizer.state_dict())
    expect({"state", "param_groups"} <= set(saved), "state and groups", list(saved))
    set_grads(params)
    optimizer.step(closure=None)
    optimizer.load_state_dict(state_dict=saved)
    expect_unchanged(saved["state"], optimizer.state_dict()["state"], "the loaded state")
    set_grads(params)
    optimizer.zero_grad(set_to_none=True)
    expect_equal(params["p0"].grad, None, "the gradient")


@pytest.mark.clause("KEYED-114")
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "SparseAdam"])
def test_a_step_does_not_modify_gradients(impl, name):
    """After a step each .grad is the same tensor with the same values."""
    params = parameters(2, (4, 2))
    optimizer = impl.KeyedOptimizerWrapper(params, lambda listed: getattr(torch.optim, name)(listed, lr=0.1))
    for _ in range(2):
        set_wide_grads(params)
        if name == "SparseAdam":
            for param in params.values():
                set_sparse_grad(param, [1, 3, 1], scale=1024.0)
        given = [param.grad for param in params.values()]
        before = [grad.to_dense().clone() for grad in given]
        optimizer.step()
        for param, grad, old in zip(params.values(), given, before, strict=True):
            expect(param.grad is grad, "the same tensor as gradient", param.grad)
            expect_bits(grad.to_dense(), old, "the gradient after a step")


@pytest.mark.clause("KEYED-115")
def test_is_a_torch_optimizer(impl):
    """KeyedOptimizer and KeyedOptimizerWrapper derive from torch.optim.Optimizer."""
    for name in ("KeyedOptimizer", "KeyedOptimizerWrapper"):
        expect_derived(getattr(impl, name), torch.optim.Optimizer)
    expect_derived(impl.KeyedOptimizerWrapper, impl.KeyedOptimizer)
    expect(isinstance(sgd(impl, parameters(1)), torch.optim.Optimizer), "a torch optimizer", "another object")


@pytest.mark.clause("KEYED-116")
def test_a_frozen_parameter_is_added(impl):
    """A parameter that has a key but is in no group can be added, is trained and is saved."""
    params, others = parameters(2), parameters(2)
    late = params["p1"].requires_grad_(False)
    optimizer = impl.KeyedOptimizerWrapper(
        params, lambda listed: torch.optim.SGD([listed[0]], lr=0.1, momentum=0.5)
    )
    train(optimizer, [params["p0"]], 1)
    expect_bits(late.detach(), others["p1"].detach(), "a frozen parameter")
    optimizer.add_param_group(param_group={"params": [late.requires_grad_(True)], "lr": 0.5})
    plain = torch.optim.SGD([others["p1"]], lr=0.5, momentum=0.5)
    set_grads(params)
    others["p1"].grad = late.grad.clone()
    optimizer.step()
    plain.step()
    expect_bits(late.detach(), others["p1"].detach(), "the added parameter after a step")
    expect_equal(len(list(optimizer.param_groups)), 2, "number of groups")
    expect_equal(list(optimizer.params), ["p0", "p1"], "keys of the parameters")
    expect_equal(set(optimizer.state_dict()["state"]), {"p0", "p1"}, "keys of the saved state")


@pytest.mark.clause("KEYED-117")
@pytest.mark.parametrize("none", [True, False])
def test_gradients_after_zero_grad(impl, none):
    """A parameter without a gradient stays None and is skipped; one with a zero gradient is stepped."""
    params = parameters(2)
    optimizer = sgd(impl, params, momentum=0.5)
    train(optimizer, params, 1)
    before = values(params)
    optimizer.zero_grad(set_to_none=none)
    params["p0"].sum().backward()
    expect_equal(params["p1"].grad is None, none, "whether a parameter that received no gradient has None")
    optimizer.step()
    expect(not torch.equal(params["p0"].detach(), before[0]), "a parameter with a gradient moves", before[0])
    still = torch.equal(params["p1"].detach(), before[1])
    expect_equal(still, none, "whether a step skips the other parameter, which has momentum")


@pytest.mark.clause("KEYED-119")
@pytest.mark.parametrize("nested", [False, True])
def test_late_state_is_an_error(impl, nested):
    """A second step that adds state raises an error."""

    class Growing(torch.optim.SGD):
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                entry = self.state[param].setdefault("more", {}) if nested else self.state[param]
                entry[f"m{len(entry)}"] = torch.zeros_like(param)

    params = parameters(1)
    optimizer = impl.KeyedOptimizerWrapper(params, lambda listed: Growing(listed, lr=0.1))
    train(optimizer, params, 1)
    expect_raises(optimizer.step, Exception, expected="an error in the step that adds state")


@pytest.mark.clause("KEYED-120")
@pytest.mark.parametrize("fault", ["parameter", "entry"])
def test_missing_state_is_an_error(impl, fault):
    """Loading state that lacks a parameter, or an entry of one, raises an error."""
    params = parameters(2)
    optimizer = adam(impl, params)
    train(optimizer, params, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    if fault == "parameter":
        del saved["state"]["p1"]
    else:
        saved["state"]["p1"].popitem()
    expect_raises(lambda: optimizer.load_state_dict(saved), Exception, expected=f"an error: no {fault}")


@pytest.mark.clause("KEYED-121")
def test_post_load_state_dict(impl):
    """load_state_dict calls post_load_state_dict when everything is loaded."""
    seen: list[float] = []

    class Noting(impl.KeyedOptimizer):
        def post_load_state_dict(self) -> None:
            seen.extend(float(entry["m"][0]) for entry in self.state_dict()["state"].values())

    params = parameters(2)
    optimizer = Noting(params, {param: {"m": ones(3)} for param in params.values()}, [])
    optimizer.load_state_dict({"state": {key: {"m": full((3,), 4.0)} for key in params}})
    expect_equal(set(seen), {4.0}, "the state that post_load_state_dict saw")
