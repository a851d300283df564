"""Keyed optimizers: the contents of `state_dict`."""

from collections import OrderedDict

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_raises,
    expect_unchanged,
    same_bits,
    snapshot,
)
from keyedopt.conformance.suite.support.device import full, linear, ones, tensor, zeros
from keyedopt.conformance.suite.support.doubles import Stateful
from keyedopt.conformance.suite.support.inputs import adam, parameters, set_grads, sgd, train


@pytest.mark.clause("KEYED-011")
@pytest.mark.plain_only("it compares all keys")
def test_state_is_named_by_parameter(impl, dtype):
    """State appears under the keys of the parameters, with all entries of the optimizer."""
    params = parameters(3, dtype=dtype)
    optimizer = adam(impl, params)
    train(optimizer, params, 2)
    saved = optimizer.state_dict()["state"]
    expect_equal(sorted(saved), ["p0", "p1", "p2"], "keys of the state")
    for key, entry in saved.items():
        expect_equal(sorted(entry), ["exp_avg", "exp_avg_sq", "step"], f"state of {key}")


@pytest.mark.clause("KEYED-011")
def test_state_belongs_to_the_parameter_of_its_key(impl):
    """The state under a key belongs to that parameter, in any group order."""
    params = parameters(3)
    backwards = [{"params": [params[key]], "lr": 0.1} for key in ("p2", "p0", "p1")]
    state = {params[key]: {"tag": full((2,), number)} for number, key in enumerate(("p1", "p2", "p0"))}
    saved = impl.KeyedOptimizer(params, state, backwards).state_dict()["state"]
    seen = {key: int(entry["tag"][0]) for key, entry in saved.items()}
    expect_equal(seen, {"p1": 0, "p2": 1, "p0": 2}, "tags by key")


@pytest.mark.clause("KEYED-012")
def test_groups_are_left_out_unless_asked_for(impl):
    """state_dict contains no param_groups by default."""
    params = parameters(2)
    optimizer = adam(impl, params)
    optimizer.init_state()
    expect("param_groups" not in optimizer.state_dict(), "no groups", optimizer.state_dict())


@pytest.mark.clause("KEYED-013")
def test_groups_are_saved_on_demand(impl):
    """save_param_groups(True) adds groups, with keys for parameters; False removes them."""
    params = parameters(3)
    groups = [
        {"params": [params["p2"], params["p0"]], "lr": 0.1, "betas": (0.9, 0.99)},
        {"params": [params["p1"]], "lr": 0.2, "betas": (0.8, 0.88)},
    ]
    optimizer = impl.KeyedOptimizer(params, {}, groups)
    optimizer.save_param_groups(True)
    saved = optimizer.state_dict()["param_groups"]
    seen = sorted((sorted(group["params"]), group["lr"], tuple(group["betas"])) for group in saved)
    wanted = [(["p0", "p2"], 0.1, (0.9, 0.99)), (["p1"], 0.2, (0.8, 0.88))]
    expect_equal(seen, wanted, "keys and options of the groups")
    expect(groups[0]["params"][0] is params["p2"], "live groups that still hold parameters", groups)
    optimizer.save_param_groups(False)
    expect("param_groups" not in optimizer.state_dict(), "no groups after False", optimizer.state_dict())


@pytest.mark.clause("KEYED-014")
def test_saved_tensors_are_the_live_ones(impl, dtype):
    """A tensor in the state dict is the live tensor, before and after further steps."""
    params = parameters(2, dtype=dtype)
    optimizer = adam(impl, params)
    train(optimizer, params, 1)
    saved = optimizer.state_dict()["state"]["p0"]["exp_avg"]
    live = optimizer.state[params["p0"]]["exp_avg"]
    train(optimizer, params, 2, seed=5)
    expect_bits(saved, live, "the saved tensor after two further steps")
    saved.fill_(7.0)
    expect_bits(optimizer.state[params["p0"]]["exp_avg"], torch.full_like(live, 7.0), "live state")


@pytest.mark.clause("KEYED-015")
def test_saved_groups_are_copies(impl):
    """A saved group keeps its values when the live group changes, and the reverse."""
    params = parameters(1)
    groups = [{"params": [params["p0"]], "lr": tensor(0.1), "betas": [0.9, 0.99]}]
    optimizer = impl.KeyedOptimizer(params, {}, groups)
    optimizer.save_param_groups(True)
    saved = optimizer.state_dict()["param_groups"][0]
    groups[0]["lr"].fill_(0.5)
    groups[0]["betas"][0] = 0.0
    expect_bits(saved["lr"], torch.tensor(0.1), "the saved learning rate")
    expect_equal(list(saved["betas"]), [0.9, 0.99], "the saved betas")
    saved["betas"][1] = 0.0
    saved["params"].clear()
    expect_equal(groups[0]["betas"], [0.0, 0.99], "the live betas")
    expect_equal(len(groups[0]["params"]), 1, "number of live parameters")


@pytest.mark.clause("KEYED-125")
def test_saved_entries_are_copies(impl):
    """A saved entry can be edited, as when its keys are renamed, and the optimizer keeps its own."""
    params = parameters(2)
    optimizer = adam(impl, params)
    train(optimizer, params, 1)
    before = [sorted(entry) for entry in optimizer.state.values()]
    saved = optimizer.state_dict()["state"]
    for entry in saved.values():
        entry["first_moment"] = entry.pop("exp_avg")
    del saved["p0"]
    seen = [sorted(entry) for entry in optimizer.state.values()]
    expect_equal(seen, before, "names of the live state")
    nested = {params["p0"]: {"outer": {"inner": {"a": ones(2)}}}}
    optimizer = impl.KeyedOptimizer(params, nested, [])
    optimizer.state_dict()["state"]["p0"]["outer"]["inner"].clear()
    expect_equal(list(nested[params["p0"]]["outer"]["inner"]), ["a"], "names in a nested mapping")


@pytest.mark.clause("KEYED-016")
def test_stateful_objects_appear_as_their_state(impl):
    """A stateful object appears as its own state dict, also when nested."""
    params = parameters(1)
    state = {
        params["p0"]: {
            "object": Stateful(tensor([1.0, 2.0])),
            "deep": {"object": Stateful(tensor([3.0]))},
            "ordered": OrderedDict(object=Stateful(tensor([4.0]))),
            "module": linear(2, 1),
        }
    }
    saved = impl.KeyedOptimizer(params, state, []).state_dict()["state"]["p0"]
    expect(isinstance(saved["object"], dict), "a state dict", type(saved["object"]).__name__)
    expect_bits(saved["object"]["tensor"], torch.tensor([1.0, 2.0]), "state of the object")
    expect_bits(saved["deep"]["object"]["tensor"], torch.tensor([3.0]), "state of the nested one")
    expect_bits(saved["ordered"]["object"]["tensor"], torch.tensor([4.0]), "state in an OrderedDict")
    expect_equal(sorted(saved["module"]), ["bias", "weight"], "state of a module")


@pytest.mark.clause("KEYED-017")
def test_the_shape_of_the_live_state_is_not_the_callers_to_change(impl):
    """Changing keys of a state dict has no effect."""
    params = parameters(1)
    state = {params["p0"]: {"deep": {"moment": ones(3)}, "count": 3}}
    optimizer = impl.KeyedOptimizer(params, state, [])
    before = snapshot(optimizer.state_dict())
    saved = optimizer.state_dict()
    saved["state"]["p0"]["deep"]["more"] = zeros(1)
    saved["state"]["p0"]["deep"]["moment"] = zeros(1)
    saved["state"]["p0"].pop("count")
    saved["state"]["p1"] = {}
    expect_unchanged(before, optimizer.state_dict(), "state dict")


@pytest.mark.clause("KEYED-018")
@pytest.mark.parametrize("where", ["group", "second group", "state"])
def test_what_is_optimized_without_a_key_is_not_left_out(impl, where):
    """Saving raises if the optimizer updates a parameter without a key."""
    params = parameters(2)
    keyed = {"p0": params["p0"]}
    if where == "group":
        optimizer = impl.KeyedOptimizer(keyed, {}, [{"params": list(params.values()), "lr": 0.1}])
    elif where == "second group":
        groups = [{"params": [param], "lr": 0.1} for param in params.values()]
        optimizer = impl.KeyedOptimizer(keyed, {}, groups)
    else:
        state = {}
        optimizer = impl.KeyedOptimizer(keyed, state, [])
        state[params["p1"]] = {"moment": ones(3)}
    expect_raises(
        optimizer.state_dict, ValueError, KeyError, expected="an error for a parameter without a key"
    )


@pytest.mark.clause("KEYED-019")
def test_order_of_keys(impl):
    """Observe the order of parameters in the state dict if state was created in another order."""
    params = parameters(3)
    optimizer = sgd(impl, params, momentum=0.9)
    for key in ("p2", "p0", "p1"):
        set_grads({key: params[key]})
        optimizer.step()
        params[key].grad = None
    return list(optimizer.state_dict()["state"])


@pytest.mark.clause("KEYED-020")
@pytest.mark.parametrize("special", [[float("nan"), float("inf"), -0.0]])
def test_non_finite_state_is_saved_and_loaded_bit_by_bit(impl, special):
    """NaN, infinities and signed zeros survive save and load."""
    params, others = parameters(1), parameters(1)
    held = tensor(special)
    old = impl.KeyedOptimizer(params, {params["p0"]: {"m": held, "x": float("nan")}}, [])
    new = impl.KeyedOptimizer(others, {others["p0"]: {"m": zeros(3), "x": 0.0}}, [])
    new.load_state_dict(old.state_dict())
    loaded = new.state[others["p0"]]
    expect(same_bits(loaded["m"], held), f"{special}", loaded["m"])
    expect(loaded["x"] != loaded["x"], "nan", loaded["x"])
