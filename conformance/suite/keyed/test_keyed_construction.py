"""Keyed optimizers: accepted constructor arguments, and those that raise an error."""

import functools

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_raises,
    outcome,
)
from keyedopt.conformance.suite.support.device import ones
from keyedopt.conformance.suite.support.inputs import parameters, set_grads, values


def momentum_like(params):
    """Return state as an optimizer has it: a tensor for each parameter."""
    return {param: {"moment": torch.zeros_like(param)} for param in params.values()}


@pytest.mark.clause("KEYED-001")
def test_state_of_what_is_no_parameter_is_refused(impl):
    """The constructor raises ValueError for state of a non-parameter."""
    params = parameters(2)
    expect_raises(
        lambda: impl.KeyedOptimizer({"p0": params["p0"]}, momentum_like(params), []),
        ValueError,
        expected="a ValueError for state without a parameter",
    )
    expect_raises(
        lambda: impl.KeyedOptimizer(params, {"p0": {}}, []),
        ValueError,
        expected="a ValueError for state under a name in place of a parameter",
    )


@pytest.mark.clause("KEYED-002")
def test_one_parameter_under_two_keys_is_refused(impl):
    """The constructor raises ValueError if two keys name one parameter."""
    param = parameters(1)["p0"]
    expect_raises(
        lambda: impl.KeyedOptimizer({"a": param, "b": param}, {param: {"moment": param * 0}}, []),
        ValueError,
        expected="a ValueError for one parameter under two keys: one of them would not be saved",
    )


@pytest.mark.clause("KEYED-002")
def test_tied_parameters_are_refused_around_a_torch_optimizer(impl):
    """A wrapper raises ValueError if two keys name one parameter."""
    param = parameters(1)["p0"]
    factory = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    expect_raises(
        lambda: impl.KeyedOptimizerWrapper(
            {"input.weight": param, "output.weight": param}, lambda listed: factory([listed[0]])
        ),
        ValueError,
        expected="a ValueError for one parameter under two keys",
    )


@pytest.mark.clause("KEYED-003")
@pytest.mark.plain_only("it adds to the mappings that it passed")
def test_state_and_groups_are_live(impl):
    """State and groups that are filled after construction belong to the keyed optimizer."""
    params = parameters(1)
    state, groups = {}, [{"params": [params["p0"]], "lr": 0.1}]
    optimizer = impl.KeyedOptimizer(params, state, groups)
    optimizer.save_param_groups(True)
    expect_equal(optimizer.state_dict()["state"], {}, "state before there is any")
    state[params["p0"]] = {"moment": ones(3)}
    groups[0]["lr"] = 0.5
    saved = optimizer.state_dict()
    expect_equal(list(saved["state"]), ["p0"], "keys of state that was filled later")
    expect_equal(saved["param_groups"][0]["lr"], 0.5, "a learning rate that was set later")


@pytest.mark.clause("KEYED-003")
def test_a_group_that_is_added_to_the_inner_optimizer_is_shown(impl):
    """A group that the inner optimizer gets after construction is a group of the keyed optimizer."""
    params = parameters(2)
    inner = torch.optim.SGD([params["p0"]], lr=0.1)
    optimizer = impl.KeyedOptimizerWrapper(params, lambda listed: inner)
    inner.add_param_group({"params": [params["p1"]], "lr": 0.5})
    expect_equal(
        [group["lr"] for group in optimizer.param_groups], [0.1, 0.5], "learning rates of the groups"
    )


@pytest.mark.clause("KEYED-004")
def test_the_factory_gets_the_parameters_in_order(impl):
    """The factory is called once, with the parameters in mapping order, also those that are frozen."""
    params, calls = parameters(3), []
    params["p1"].requires_grad_(False)

    def factory(given):
        calls.append(given)
        return torch.optim.SGD(given, lr=0.1)

    optimizer = impl.KeyedOptimizerWrapper(params, factory)
    expect_equal(len(calls), 1, "calls of the factory")
    given = list(calls[0])
    expect(
        len(given) == 3 and all(a is b for a, b in zip(given, params.values(), strict=True)),
        "the three parameters themselves, in order",
        [type(item).__name__ for item in given],
    )
    expect_equal(list(optimizer.params), ["p0", "p1", "p2"], "keys of the parameters")


@pytest.mark.clause("KEYED-005")
def test_the_factory_can_have_the_mapping(impl):
    """With pass_params_dict the factory receives the parameters by key."""
    params, calls = parameters(2), []

    def factory(given):
        calls.append(dict(given))
        return torch.optim.SGD(given.items(), lr=0.1)

    optimizer = impl.KeyedOptimizerWrapper(params, factory, pass_params_dict=True)
    expect_equal(list(calls[0]), ["p0", "p1"], "keys that the factory gets")
    expect(calls[0]["p1"] is params["p1"], "the parameter itself", calls[0]["p1"])
    set_grads(params)
    before = values(params)
    optimizer.step()
    expect(not torch.equal(before[0], params["p0"]), "an optimizer that trains", "no change")


@pytest.mark.clause("KEYED-006")
@pytest.mark.parametrize("groups", ["mapping", "outside", "no rate", "twice", "none"])
def test_unusual_groups_are_taken(impl, groups):
    """Groups may be empty, omit parameters, have no learning rate, or share a parameter."""
    params = parameters(2)
    listed = {
        "mapping": {},
        "outside": [{"params": [params["p0"]], "lr": 0.1}],
        "no rate": [{"params": list(params.values())}],
        "twice": [{"params": [params["p0"]], "lr": 0.1}, {"params": [params["p0"]], "lr": 0.2}],
        "none": [],
    }[groups]
    optimizer = impl.KeyedOptimizer(params, momentum_like(params), listed)
    expect_equal(sorted(optimizer.state_dict()["state"]), ["p0", "p1"], "keys of the state")
    optimizer.load_state_dict({"state": {key: {"moment": ones(3)} for key in params}})
    expect_bits(optimizer.state[params["p1"]]["moment"], torch.ones(3), "the loaded state")


@pytest.mark.clause("KEYED-006")
@pytest.mark.plain_only("it compares all keys")
def test_frozen_parameters_are_taken(impl, dtype):
    """A parameter that requires no gradient may have a key and state."""
    params = parameters(2, dtype=dtype)
    params["p1"].requires_grad_(False)
    optimizer = impl.KeyedOptimizerWrapper(params, functools.partial(torch.optim.Adam, lr=0.1))
    before = values(params)
    set_grads({"p0": params["p0"]})
    optimizer.step()
    expect_bits(params["p1"], before[1], "the frozen parameter")
    expect_equal(list(optimizer.state_dict()["state"]), ["p0"], "keys of the state")


@pytest.mark.clause("KEYED-007")
def test_an_optimizer_of_nothing(impl):
    """An optimizer without parameters saves and loads an empty state."""
    optimizer = impl.KeyedOptimizer({}, {}, [])
    expect_equal(optimizer.state_dict()["state"], {}, "state without parameters")
    optimizer.load_state_dict({"state": {}})
    optimizer.save_param_groups(True)
    expect_equal(optimizer.state_dict()["param_groups"], [], "groups without parameters")
    optimizer.load_state_dict({"state": {}, "param_groups": []})


@pytest.mark.clause("KEYED-008")
def test_the_mapping_of_the_caller_is_not_changed(impl):
    """The caller's mapping of parameters is not modified."""
    params = parameters(2)
    given = dict(params)
    optimizer = impl.KeyedOptimizerWrapper(given, functools.partial(torch.optim.Adam, lr=0.1))
    optimizer.init_state()
    optimizer.load_state_dict(optimizer.state_dict())
    expect_equal(list(given), ["p0", "p1"], "keys of the mapping that was given")


@pytest.mark.clause("KEYED-009")
def test_parameters_added_to_the_mapping_later(impl):
    """Observe whether a parameter that is added to the mapping later gets a key."""
    params = parameters(2)
    given = {"p0": params["p0"]}
    optimizer = impl.KeyedOptimizer(given, {}, [])
    given["p1"] = params["p1"]
    return sorted(optimizer.params)


@pytest.mark.clause("KEYED-010")
@pytest.mark.parametrize("entry", ["number", "tensor", "list"])
def test_state_that_is_no_mapping(impl, entry):
    """Observe what happens to a state entry that is not a mapping."""
    params = parameters(1)
    value = {"number": 1.0, "tensor": ones(2), "list": [1.0]}[entry]

    def build():
        impl.KeyedOptimizer(params, {params["p0"]: value}, [])

    return outcome(build)
