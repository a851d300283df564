"""Keyed optimizers: adding a parameter group, whose parameters come with their keys."""

import copy

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_raises,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.inputs import (
    adam,
    parameter,
    parameters,
    set_grads,
    sgd,
    train,
    values,
)


@pytest.mark.clause("KEYED-085")
@pytest.mark.parametrize("form", ["mapping", "pairs"])
def test_an_added_group_trains_saves_and_loads(impl, form, dtype):
    """A group given by key trains with its own options, is saved, and is loaded."""
    params = parameters(1, dtype=dtype)
    optimizer = adam(impl, params)
    train(optimizer, params, 1)
    added = {"late": parameter(2, dtype=dtype, seed=7)}
    given = dict(added) if form == "mapping" else list(added.items())
    mine = {"params": given, "lr": 0.01}
    optimizer.add_param_group(mine)
    expect(set(mine) == {"params", "lr"} and mine["params"] is given, "the caller's group unchanged", mine)
    expect_equal(sorted(params), ["p0"], "keys of the caller's mapping of parameters")
    mine["lr"] = 5.0
    expect_equal(sorted(optimizer.params), ["late", "p0"], "keys of the parameters")
    expect_equal([group["lr"] for group in optimizer.param_groups], [0.1, 0.01], "rates")
    everything = {**params, **added}
    before = values(added)
    train(optimizer, everything, 2)
    expect(not torch.equal(added["late"], before[0]), "a trained parameter", added["late"])
    optimizer.save_param_groups(True)
    saved = snapshot(optimizer.state_dict())
    expect_equal(sorted(saved["state"]), ["late", "p0"], "keys of the saved state")
    train(optimizer, everything, 1)
    optimizer.load_state_dict(saved)
    expect_unchanged(saved, optimizer.state_dict(), "state after loading it again")


@pytest.mark.clause("KEYED-085")
def test_an_added_group_equals_one_from_the_start(impl):
    """An added group trains like one from construction, also with equal values."""
    params, others = ({key: parameter(3) for key in ("p0", "p1")} for _ in range(2))
    grown = sgd(impl, {"p0": params["p0"]}, momentum=0.9)
    grown.add_param_group({"params": {"p1": params["p1"]}, "lr": 0.5})
    whole = impl.KeyedOptimizerWrapper(
        others,
        lambda listed: torch.optim.SGD(
            [{"params": [listed[0]]}, {"params": [listed[1]], "lr": 0.5}], lr=0.1, momentum=0.9
        ),
    )
    train(grown, params, 3)
    train(whole, others, 3)
    for key, param in others.items():
        expect_bits(params[key], param, f"{key} after three steps")


@pytest.mark.clause("KEYED-085")
@pytest.mark.parametrize("form", ["mapping", "pairs"])
def test_an_added_group_without_an_option_of_the_others(impl, form):
    """Options of a group that are 0, False or None are not replaced by those of the constructor."""
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5, "nesterov": True, "maximize": True}
    off = {"momentum": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False, "foreach": None}
    params, late, alone = parameters(1), {"late": parameter(2)}, {"late": parameter(2)}
    optimizer = sgd(impl, params, foreach=False, **options)
    optimizer.add_param_group({"params": late if form == "mapping" else list(late.items()), **off})
    group = [*optimizer.param_groups][1]
    expect_equal({name: group[name] for name in off}, off, "options of the added group")
    single = torch.optim.SGD(alone.values(), lr=0.1)
    for seed in range(2):
        train(optimizer, {**params, **late}, 1, seed=seed)
        alone["late"].grad = late["late"].grad.clone()
        single.step()
    expect_bits(late["late"].detach(), alone["late"].detach(), "the parameter of the added group")


@pytest.mark.clause("KEYED-085")
@pytest.mark.parametrize("form", ["mapping", "pairs"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_group_added_to_an_optimizer_of_named_parameters(impl, form, groups):
    """Around a torch optimizer that was constructed with names, an added group trains, saves and loads."""

    def make():
        params = parameters(2)
        named = list(params.items())
        given = named if groups == 1 else [{"params": named[:1]}, {"params": named[1:], "lr": 0.5}]
        made = impl.KeyedOptimizerWrapper(params, lambda _: torch.optim.SGD(given, lr=0.1, momentum=0.9))
        made.save_param_groups(True)
        late = {"late": parameter(2, seed=7)}
        made.add_param_group({"params": late if form == "mapping" else list(late.items()), "lr": 0.01})
        return made, {**params, **late}

    (optimizer, params), (other, others) = make(), make()
    expect_equal(sorted(optimizer.params), ["late", "p0", "p1"], "keys of the parameters")
    train(optimizer, params, 2)
    train(other, others, 1, seed=30)
    expect_equal(sorted(optimizer.state_dict()["state"]), ["late", "p0", "p1"], "keys of the saved state")
    other.load_state_dict(snapshot(optimizer.state_dict()))
    for key, param in params.items():
        others[key].data.copy_(param.data)
    train(optimizer, params, 2, seed=5)
    train(other, others, 2, seed=5)
    alone = {"late": parameter(2, seed=7)}
    single = sgd(impl, alone, lr=0.01, momentum=0.9)
    for seed in (1, 2, 5, 6):
        set_grads(params, seed=seed)
        alone["late"].grad = params["late"].grad.clone()
        single.step()
    expect_unchanged(values(params), values(others), "parameters after a load and two steps")
    expect_bits(params["late"].detach(), alone["late"].detach(), "the added parameter")


@pytest.mark.clause("KEYED-085")
def test_a_copy_has_the_added_group(impl):
    """A deep copy of an optimizer with an added group trains its own added parameter."""
    params = parameters(1)
    optimizer = sgd(impl, params)
    optimizer.add_param_group({"params": {"late": parameter(2, seed=7)}, "lr": 0.01})
    other = copy.deepcopy(optimizer)
    expect_equal(sorted(other.params), ["late", "p0"], "keys of the copy")
    before = values(other.params)
    train(other, other.params, 1)
    expect(not torch.equal(other.params["late"], before[1]), "a trained parameter", "no change")


@pytest.mark.clause("KEYED-085")
def test_a_group_added_to_an_optimizer_of_groups(impl):
    """An optimizer with groups adds another completely, or raises and adds nothing."""
    params, late = parameters(1), parameter(2, seed=7)
    optimizer = impl.KeyedOptimizer(params, {}, [{"params": [params["p0"]], "lr": 0.5}])
    try:
        optimizer.add_param_group({"params": {"late": late}, "lr": 0.25})
    except Exception:
        expect_equal(len(optimizer.param_groups), 1, "number of groups after an error")
        expect_equal(list(optimizer.params), ["p0"], "keys of the parameters after an error")
        return
    expect_equal([group["lr"] for group in optimizer.param_groups], [0.5, 0.25], "rates")
    expect(
        [*optimizer.param_groups][1]["params"][0] is late, "the same parameter in the new group", "another"
    )
    expect_equal(list(optimizer.params), ["p0", "late"], "keys of the parameters")


@pytest.mark.clause("KEYED-086")
def test_a_group_without_keys_is_never_swallowed(impl):
    """A group whose parameters have no keys raises an error and is not added."""
    params = parameters(1)
    optimizer = sgd(impl, params)
    for given in ([parameter(2)], parameter(2), None):
        expect_raises(
            lambda given=given: optimizer.add_param_group({"params": given, "lr": 0.01}),
            Exception,
            expected="an error: parameters without keys could not be saved",
        )
    expect_equal(len(optimizer.param_groups), 1, "number of groups")
    expect_equal(list(optimizer.params), ["p0"], "keys of the parameters")


@pytest.mark.clause("KEYED-087")
@pytest.mark.plain_only("it compares all keys")
@pytest.mark.parametrize("clash", ["key", "parameter", "twice", "no leaf"])
def test_a_clashing_group_is_refused(impl, clash):
    """A known key or parameter, or one that cannot be trained, raises and changes nothing."""
    params = parameters(2)
    optimizer = sgd(impl, params)
    fresh = parameter(2)
    given = {
        "key": [("late", fresh), ("p1", parameter(2))],
        "parameter": [("late", fresh), ("again", params["p0"])],
        "twice": [("late", fresh), ("again", fresh)],
        "no leaf": [("late", fresh * 2)],
    }[clash]
    expect_raises(
        lambda: optimizer.add_param_group({"params": given, "lr": 0.01}),
        Exception,
        expected=f"an error ({clash})",
    )
    expect_equal(len(optimizer.param_groups), 1, "number of groups")
    expect_equal(sorted(optimizer.params), ["p0", "p1"], "keys of the parameters")


@pytest.mark.clause("KEYED-087")
@pytest.mark.parametrize("named", [False, True], ids=["bare", "named"])
def test_a_parameter_of_another_group_is_refused(impl, named):
    """A KeyedOptimizer refuses a group with a parameter that is in a group already, with and without key."""
    params = parameters(2)
    optimizer = impl.KeyedOptimizer(params, {}, [{"params": list(params.values()), "lr": 0.1}])
    given = [("p0", params["p0"])] if named else [params["p0"]]
    expect_raises(
        lambda: optimizer.add_param_group({"params": given, "lr": 0.01}),
        Exception,
        expected="an error for a parameter of another group",
    )
    expect_equal(len(optimizer.param_groups), 1, "number of groups")
    expect_equal(sorted(optimizer.params), ["p0", "p1"], "keys of the parameters")
