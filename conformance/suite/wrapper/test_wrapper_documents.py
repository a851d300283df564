"""Wrappers: sentences of the documents about names, stateful objects, groups and loading."""

import copy

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_raises,
    expect_unchanged,
)
from keyedopt.conformance.suite.support.device import full, ones, zeros
from keyedopt.conformance.suite.support.doubles import Stateful
from keyedopt.conformance.suite.support.inputs import adam, parameter, parameters, set_grads, train


@pytest.mark.clause("WRAP-035")
def test_names_of_arguments(impl):
    """Every argument can be given by its documented name."""
    params = parameters(2)
    wrapper = impl.OptimizerWrapper(optimizer=adam(impl, params))
    set_grads(params)
    wrapper.step(closure=None)
    wrapper.save_param_groups(save=True)
    saved = copy.deepcopy(wrapper.state_dict())
    expect("param_groups" in saved, "the groups in the state_dict", sorted(saved))
    set_grads(params, seed=2)
    wrapper.step()
    wrapper.load_state_dict(state_dict=saved)
    expect_unchanged(saved["state"], wrapper.state_dict()["state"], "the loaded state")
    wrapper.zero_grad(set_to_none=True)
    expect_equal(params["p0"].grad, None, "the gradient")


@pytest.mark.clause("WRAP-036")
def test_stateful_objects(impl):
    """A stateful object in the state is saved as its state dict and loaded through its load_state_dict."""
    param = parameter(3)
    held = Stateful(ones(3))
    inner = impl.KeyedOptimizer({"p": param}, {param: {"object": held}}, [{"params": [param]}])
    wrapper = impl.OptimizerWrapper(inner)
    saved = copy.deepcopy(wrapper.state_dict())
    expect_unchanged(held.state_dict(), saved["state"]["p"]["object"], "the state dict of the object")
    for tensor in saved["state"]["p"]["object"].values():
        tensor.fill_(4.0)
    wrapper.load_state_dict(saved)
    expect(inner.state[param]["object"] is held, "the same object", inner.state[param]["object"])
    expect_unchanged(saved["state"]["p"]["object"], held.state_dict(), "the loaded state of the object")


@pytest.mark.clause("WRAP-037")
@pytest.mark.parametrize("fault", ["parameter", "entry", "more", "shape", "groups"])
def test_incompatible_state_is_an_error(impl, fault):
    """State or groups that do not fit the wrapped optimizer raise an error."""
    params = parameters(2)
    wrapper = impl.OptimizerWrapper(adam(impl, params))
    wrapper.save_param_groups(True)
    train(wrapper, params, 1)
    saved = copy.deepcopy(wrapper.state_dict())
    entry = saved["state"]["p1"]
    if fault == "parameter":
        del saved["state"]["p1"]
    elif fault == "entry":
        entry.popitem()
    elif fault == "more":
        entry["more"] = zeros(3)
    elif fault == "shape":
        entry[next(name for name, value in entry.items() if value.numel() > 1)] = zeros(7, 5)
    else:
        saved["param_groups"][0]["params"] = ["p0"]
    expect_raises(lambda: wrapper.load_state_dict(saved), Exception, expected=f"an error ({fault})")


@pytest.mark.clause("WRAP-038")
def test_a_frozen_parameter_is_added(impl):
    """A parameter that has a key but is in no group can be added through a wrapper, and is then trained."""
    params = parameters(2)
    late = params["p1"].requires_grad_(False)
    inner = impl.KeyedOptimizerWrapper(params, lambda listed: torch.optim.SGD([listed[0]], lr=0.1))
    wrapper = impl.OptimizerWrapper(inner)
    wrapper.add_param_group(param_group={"params": [late.requires_grad_(True)], "lr": 0.5})
    before = late.detach().clone()
    set_grads(params)
    wrapper.step()
    expect_bits(late.detach(), before.add(late.grad, alpha=-0.5), "the added parameter after a step")
    expect_equal(list(wrapper.params), ["p0", "p1"], "keys of the parameters")


@pytest.mark.clause("WRAP-039")
def test_post_load_state_dict(impl):
    """A load calls post_load_state_dict of the wrapped optimizer when its state is loaded."""
    seen: list[float] = []

    class Noting(impl.KeyedOptimizer):
        def post_load_state_dict(self) -> None:
            seen.append(float(self.state_dict()["state"]["p"]["m"][0]))

    param = parameter(3)
    wrapper = impl.OptimizerWrapper(Noting({"p": param}, {param: {"m": zeros(3)}}, []))
    wrapper.load_state_dict({"state": {"p": {"m": full((3,), 4.0)}}})
    expect_equal(set(seen), {4.0}, "the state that post_load_state_dict saw")
