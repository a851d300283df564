"""Combined optimizers: saving groups, nesting, and init_state."""

import copy
from typing import Any

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
from keyedopt.conformance.suite.support.combined import combined_pair, loadable_parts
from keyedopt.conformance.suite.support.inputs import adagrad, adam, parameter, train


@pytest.mark.clause("COMB-016")
def test_groups_are_saved_and_loaded_on_demand(impl):
    """With save_param_groups(True) groups are saved and loaded into their optimizers."""
    saved, inner, _ = combined_pair(impl, steps=1)
    expect("param_groups" not in saved.state_dict(), "no groups by default", saved.state_dict().keys())
    saved.save_param_groups(True)
    for optimizer, rate in zip(inner, (0.25, 0.75), strict=True):
        optimizer.param_groups[0]["lr"] = rate
    given = copy.deepcopy(saved.state_dict())
    names = sorted(key for group in given["param_groups"] for key in group["params"])
    expect_equal(names, ["a.p", "b.p"], "keys of groups")
    fresh, fresh_inner, _ = combined_pair(impl, steps=1)
    fresh.save_param_groups(True)
    given["param_groups"].reverse()  # they are known by their keys, not by their place
    fresh.load_state_dict(given)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in fresh_inner]
    expect_equal(rates, [0.25, 0.75], "loaded learning rates")
    fresh.save_param_groups(False)
    expect("param_groups" not in fresh.state_dict(), "no groups", fresh.state_dict().keys())
    for group in given["param_groups"]:
        group["lr"] = 0.1
    fresh.load_state_dict(given)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in fresh_inner]
    expect_equal(rates, [0.25, 0.75], "learning rates when groups are not to be loaded")


@pytest.mark.clause("COMB-016")
def test_the_flag_of_the_combined_optimizers_is_taken_over(impl):
    """A combination of optimizers that save their groups saves groups."""
    params = [parameter(2, seed=seed) for seed in range(2)]
    inner = [adam(impl, {"p": param}) for param in params]
    for optimizer in inner:
        optimizer.save_param_groups(True)
    combined = impl.CombinedOptimizer([("a", inner[0]), ("b", inner[1])])
    groups = combined.state_dict().get("param_groups", [])
    names = sorted(key for group in groups for key in group["params"])
    expect_equal(names, ["a.p", "b.p"], "keys of saved groups")
    combined.save_param_groups(False)
    saving = ["param_groups" in optimizer.state_dict() for optimizer in inner]
    expect_equal(saving, [False, False], "optimizers inside that save their groups after False")


@pytest.mark.clause("COMB-017")
@pytest.mark.parametrize("saving", [[0], [1], [0, 2]])
def test_groups_are_saved_for_all_optimizers_or_none(impl, saving):
    """If only some save groups, combining raises, or saves all groups or none."""
    inner = [(f"o{seed}", adam(impl, {"p": parameter(2, seed=seed)})) for seed in range(3)]
    for number in saving:
        inner[number][1].save_param_groups(True)
    try:
        saved = impl.CombinedOptimizer(inner).state_dict()
    except Exception:
        return
    names = sorted(key for group in saved.get("param_groups", []) for key in group["params"])
    complete = names in ([], ["o0.p", "o1.p", "o2.p"])
    expect(complete, "an error, or the groups of all three or none", names)


@pytest.mark.clause("COMB-018")
@pytest.mark.parametrize(
    "how", ["missing", "too many", "keys", "option missing", "option unknown", "no list"]
)
def test_groups_that_do_not_fit_are_refused_as_a_whole(impl, how):
    """Loading a group that does not match raises ValueError and changes nothing."""
    combined, inner, params = combined_pair(impl, steps=1)
    combined.save_param_groups(True)
    given = copy.deepcopy(combined.state_dict())
    groups = given["param_groups"]
    groups.sort(key=lambda group: group["params"])
    given["state"]["a.p"]["exp_avg"].fill_(9.0)
    groups[0]["lr"] = 9.0
    if how == "missing":
        groups.pop()
    elif how == "too many":
        groups.append(copy.deepcopy(groups[0]))
    elif how == "keys":
        groups[1]["params"] = ["b.q"]
    elif how == "option missing":
        del groups[1]["momentum"]
    elif how == "option unknown":
        groups[1]["friction"] = groups[1].pop("momentum")
    else:
        del given["param_groups"]
    before = snapshot(loadable_parts(inner, params))
    try:
        expect_raises(lambda: combined.load_state_dict(given), ValueError, expected="a ValueError")
    finally:
        expect_unchanged(before, loadable_parts(inner, params), "a combination that refused groups")


def nested(impl: Any) -> tuple[Any, list[Any]]:
    """Build a combination of combinations, one of them two levels deep."""
    params = [parameter(2, seed=seed) for seed in range(3)]
    deep = impl.CombinedOptimizer([("d", adam(impl, {"p": params[2]}))])
    inside = impl.CombinedOptimizer([("c", adagrad(impl, {"p": params[1]})), deep])
    return impl.CombinedOptimizer([("a", adam(impl, {"p": params[0]})), ("b", inside)]), params


@pytest.mark.clause("COMB-019")
def test_combinations_nest(impl):
    """State and groups of nested combinations are saved and loaded under joined keys."""
    saved, params = nested(impl)
    saved.save_param_groups(True)
    train(saved, params, 2)
    given = copy.deepcopy(saved.state_dict())
    expect_equal(set(given["state"]), {"a.p", "b.c.p", "b.d.p"}, "keys of the saved state")
    names = sorted(key for group in given["param_groups"] for key in group["params"])
    expect_equal(names, ["a.p", "b.c.p", "b.d.p"], "keys of the saved groups")
    fresh, _fresh_params = nested(impl)
    fresh.save_param_groups(True)
    fresh.init_state()
    for group in given["param_groups"]:
        if group["params"] == ["b.d.p"]:
            group["lr"] = 0.625
    fresh.load_state_dict(given)
    expect_unchanged(snapshot(given["state"]), fresh.state_dict()["state"], "the loaded state")
    expect_equal(list(fresh.param_groups)[-1]["lr"], 0.625, "the learning rate of the innermost group")


@pytest.mark.clause("COMB-020")
@pytest.mark.parametrize("stepped", [False, True])
def test_state_behind_a_wrapper_is_not_lost(impl, stepped):
    """A combination that contains a wrapped combination saves all state, also later state."""
    params = [parameter(2, seed=seed) for seed in range(2)]
    inner = [adam(impl, {"p": param}) for param in params]
    deep = impl.CombinedOptimizer([("x", inner[0]), ("y", inner[1])])
    if stepped:
        train(deep, params, 1)
    combined = impl.CombinedOptimizer([("w", impl.OptimizerWrapper(deep))])
    train(combined, params, 1, seed=5)
    saved = combined.state_dict()["state"]
    expect_equal(set(saved), {"w.x.p", "w.y.p"}, "keys of the saved state")
    for key, optimizer, param in zip(("w.x.p", "w.y.p"), inner, params, strict=True):
        expect_unchanged(snapshot(optimizer.state[param]), saved[key], f"saved state of {key}")
    expect_equal(len(combined.state), 2, "entries of the view")


@pytest.mark.clause("COMB-030")
def test_init_state_makes_room_for_a_checkpoint(impl):
    """After init_state a fresh combination loads the checkpoint of a trained one."""
    saved, _, _ = combined_pair(impl, steps=3)
    fresh, _, _ = combined_pair(impl)
    fresh.init_state()
    expect_equal(set(fresh.state_dict()["state"]), {"a.p", "b.p"}, "initialized entries")
    given = copy.deepcopy(saved.state_dict())
    fresh.load_state_dict(given)
    expect_unchanged(snapshot(given["state"]), fresh.state_dict()["state"], "the loaded state")


@pytest.mark.clause("COMB-031")
def test_init_state_is_otherwise_invisible(impl):
    """init_state leaves zero gradients, sparse where named, and changes no parameter."""
    combined, _, params = combined_pair(impl)
    calls: list[int] = []
    combined.register_step_pre_hook(lambda *_: calls.append(1))
    before = snapshot(params)
    combined.init_state({"b.p"})
    expect_unchanged(before, params, "parameters")
    expect_equal([param.grad.is_sparse for param in params], [False, True], "which gradients are sparse")
    for param in params:
        expect_bits(param.grad.to_dense(), torch.zeros_like(param), "the gradient that is left")
    expect_equal(calls, [], "step hooks that ran")


@pytest.mark.clause("COMB-031")
@pytest.mark.parametrize("name", ["Adam", "Adagrad", "SGD"])
def test_training_after_init_state_equals_training_without(impl, name):
    """Adam, Adagrad and plain SGD train equally with and without init_state."""

    def build():
        params = [parameter(3, seed=seed) for seed in range(2)]
        inner = [
            (
                key,
                impl.KeyedOptimizerWrapper(
                    {"p": param}, lambda listed: getattr(torch.optim, name)(listed, lr=0.1)
                ),
            )
            for key, param in zip("ab", params, strict=True)
        ]
        return impl.CombinedOptimizer(inner), params

    combined, params = build()
    combined.init_state()
    plain, others = build()
    train(combined, params, 3)
    train(plain, others, 3)
    for param, other in zip(params, others, strict=True):
        expect_bits(param, other, "a parameter after three steps")
