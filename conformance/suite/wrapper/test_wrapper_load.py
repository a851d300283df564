"""Wrappers: saving and loading, init_state, added groups."""

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
from keyedopt.conformance.suite.support.device import full, the_device
from keyedopt.conformance.suite.support.doubles import single_rank
from keyedopt.conformance.suite.support.inputs import adam, parameter, sgd, train
from keyedopt.conformance.suite.support.wrapper import wrap_plainly, wrapped_adam


@pytest.mark.clause("WRAP-013")
@pytest.mark.parametrize("depth", [1, 2])
def test_state_dict_is_that_of_the_wrapped_one(impl, dtype, depth):
    """state_dict contains the live state of the wrapped optimizer by key."""
    wrapper, inner, params = wrapped_adam(impl, dtype, steps=2, depth=depth)
    saved = wrapper.state_dict()
    expect_equal(set(saved["state"]), {"p", "q"}, "keys of the saved state")
    expect("param_groups" not in saved, "no groups by default", list(saved))
    for key, param in zip(("p", "q"), params, strict=True):
        expect_equal(set(saved["state"][key]), set(inner.state[param]), f"entries of {key}")
        for name, value in inner.state[param].items():
            expect(saved["state"][key][name] is value, f"the live {name} of {key}", saved["state"][key])
    expect_unchanged(snapshot(inner.state_dict()), saved, "what is saved")


@pytest.mark.clause("WRAP-014")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_resumed_wrapper_trains_on_as_the_saved_one(impl, dtype, depth):
    """A load fills the wrapped state in place; training resumes exactly."""
    saved, _, params = wrapped_adam(impl, dtype, steps=3, depth=depth)
    fresh, inner, others = wrapped_adam(impl, dtype, depth=depth)
    fresh.init_state()
    live = [inner.state[param]["exp_avg"] for param in others]
    fresh.load_state_dict(copy.deepcopy(saved.state_dict()))
    for param, tensor in zip(others, live, strict=True):
        expect(inner.state[param]["exp_avg"] is tensor, "the tensor that was there", inner.state[param])
        expect(fresh.state[param]["exp_avg"] is tensor, "the same in the wrapper", fresh.state[param])
    with torch.no_grad():
        for param, other in zip(params, others, strict=True):
            other.copy_(param)
    train(saved, params, 2, seed=9)
    train(fresh, others, 2, seed=9)
    for param, other in zip(params, others, strict=True):
        expect_bits(other, param, "a parameter after two more steps")


@pytest.mark.clause("WRAP-015")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("full", [False, True])
def test_empty_and_full_do_not_mix(impl, depth, full):
    """Loading empty state into an initialized optimizer raises, and so does the reverse."""
    initialized, _, _ = wrapped_adam(impl, steps=1, depth=depth)
    fresh, _, _ = wrapped_adam(impl, depth=depth)
    given = copy.deepcopy((initialized if full else fresh).state_dict())
    target = fresh if full else initialized
    before = snapshot(target.state_dict())
    expect_raises(lambda: target.load_state_dict(given), Exception, expected="an error from the load")
    expect_unchanged(before, target.state_dict(), "the state")


@pytest.mark.clause("WRAP-016")
@pytest.mark.plain_only("its optimizer is of a class of its own")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("how", ["missing", "unknown", "shape", "kind", "no state", "groups"])
def test_a_malformed_state_is_refused_as_a_whole(impl, depth, how):
    """Malformed state raises ValueError; nothing is written or notified."""
    told: list[int] = []

    class Told(impl.KeyedOptimizerWrapper):
        def post_load_state_dict(self):
            told.append(1)

    params = [parameter(3, seed=1), parameter(2, seed=2)]
    inner = Told({"p": params[0], "q": params[1]}, torch.optim.Adam)
    wrapper = wrap_plainly(impl, inner, depth)
    wrapper.save_param_groups(True)
    train(wrapper, params, 2)
    given = copy.deepcopy(wrapper.state_dict())
    given["state"]["p"]["exp_avg"].fill_(9.0)
    given["param_groups"][0]["lr"] = 9.0
    last = given["state"]["q"]
    if how == "missing":
        del last["exp_avg_sq"]
    elif how == "unknown":
        last["v"] = last.pop("exp_avg_sq")
    elif how == "shape":
        last["exp_avg_sq"] = full((1,), 9.0)
    elif how == "kind":
        last["exp_avg_sq"] = {"v": 9.0}
    elif how == "no state":
        del given["state"]
    else:
        given["param_groups"][0]["params"] = ["p", "r"]
    before = snapshot(wrapper.state_dict())
    try:
        expect_raises(lambda: wrapper.load_state_dict(given), ValueError, expected="a ValueError")
    finally:
        expect_unchanged(before, wrapper.state_dict(), "an optimizer after a load that raised")
    expect_equal(told, [], "calls of post_load_state_dict")


@pytest.mark.clause("WRAP-009")
@pytest.mark.plain_only("its optimizer is of a class of its own")
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_everyone_is_told_of_a_load_once(impl, depth):
    """post_load_state_dict of the wrapped optimizer runs once per load at any depth."""

    class Told(impl.KeyedOptimizerWrapper):
        notes: Any = ()

        def post_load_state_dict(self):
            self.notes = (*self.notes, float(self.state_dict()["state"]["p"]["sum"][0]))

    param = parameter(2)
    inner = Told({"p": param}, torch.optim.Adagrad)
    wrapper = wrap_plainly(impl, inner, depth)
    given = copy.deepcopy(wrapper.state_dict())
    given["state"]["p"]["sum"].fill_(4.0)
    wrapper.load_state_dict(given)
    expect_equal(inner.notes, (4.0,), "what the wrapped optimizer saw, at each call")
    wrapper.post_load_state_dict()
    expect_equal(len(inner.notes), 2, "calls after one by hand")


@pytest.mark.clause("WRAP-009")
def test_a_wrapper_is_told_of_a_load_once(impl):
    """post_load_state_dict of a subclass runs once per load, also when nested."""

    class Told(impl.OptimizerWrapper):
        calls = 0

        def post_load_state_dict(self):
            self.calls += 1

    def build():
        return Told(sgd(impl, {"p": parameter(2)}))

    for around in (
        lambda told: told,
        impl.OptimizerWrapper,
        lambda told: impl.CombinedOptimizer([("k", told)]),
        lambda told: impl.OptimizerWrapper(impl.CombinedOptimizer([("k", told)])),
    ):
        told = build()
        outer = around(told)
        outer.load_state_dict(copy.deepcopy(outer.state_dict()))
        expect_equal(told.calls, 1, "calls of post_load_state_dict in one load")


@pytest.mark.clause("WRAP-017")
@pytest.mark.parametrize("depth", [1, 2])
def test_groups_are_saved_and_loaded_on_demand(impl, depth):
    """Groups are saved and loaded through a wrapper with save_param_groups(True)."""
    wrapper, inner, _ = wrapped_adam(impl, steps=1, depth=depth)
    wrapper.save_param_groups(True)
    given = copy.deepcopy(wrapper.state_dict())
    expect_equal([group["params"] for group in given["param_groups"]], [["p", "q"]], "keys of groups")
    given["param_groups"][0]["lr"] = 0.625
    wrapper.load_state_dict(given)
    expect_equal(inner.param_groups[0]["lr"], 0.625, "the learning rate of the wrapped optimizer")
    expect_equal(next(iter(wrapper.param_groups))["lr"], 0.625, "the learning rate that the wrapper shows")
    wrapper.save_param_groups(False)
    expect("param_groups" not in wrapper.state_dict(), "no groups", list(wrapper.state_dict()))


@pytest.mark.clause("WRAP-018")
@pytest.mark.parametrize("at", ["wrapped", "wrapper", "outer wrapper"])
def test_the_choice_to_save_groups_holds_in_all_layers(impl, at):
    """A combination of wrappers that save groups saves them, or raises."""
    inner = adam(impl, {"p": parameter(2)})
    layers = {"wrapped": inner, "wrapper": impl.OptimizerWrapper(inner)}
    layers["outer wrapper"] = impl.OptimizerWrapper(layers["wrapper"])
    layers[at].save_param_groups(True)
    for name, layer in layers.items():
        expect("param_groups" in layer.state_dict(), f"groups saved by the {name}", list(layer.state_dict()))
    try:
        saved = impl.CombinedOptimizer([("k", layers["outer wrapper"])]).state_dict()
    except Exception:
        return
    names = [group["params"] for group in saved.get("param_groups", [])]
    expect_equal(names, [["k.p"]], "groups saved by a combination of the wrapper")


@pytest.mark.clause("WRAP-019")
@pytest.mark.parametrize("around", ["wrapper", "two wrappers", "wrapper of a combination"])
def test_init_state_makes_room_for_a_checkpoint(impl, around):
    """After init_state through wrappers a checkpoint is loaded in place."""

    def build():
        param = parameter(3)
        inner = adam(impl, {"p": param})
        if around == "wrapper of a combination":
            return impl.OptimizerWrapper(impl.CombinedOptimizer([inner])), inner, param
        return wrap_plainly(impl, inner, 2 if around == "two wrappers" else 1), inner, param

    saved, _, param = build()
    train(saved, [param], 2)
    fresh, inner, other = build()
    fresh.init_state()
    expect_equal(set(inner.state[other]), {"step", "exp_avg", "exp_avg_sq"}, "initialized entries")
    given = copy.deepcopy(saved.state_dict())
    fresh.load_state_dict(given)
    expect_unchanged(snapshot(given["state"]), fresh.state_dict()["state"], "the loaded state")


@pytest.mark.clause("WRAP-020")
@pytest.mark.parametrize("depth", [1, 2])
def test_init_state_is_otherwise_invisible(impl, depth):
    """init_state leaves zero gradients, sparse where named, and does not affect training."""
    param, table = parameter(3, seed=1), parameter(4, 2, seed=2)
    wrapper = wrap_plainly(impl, sgd(impl, {"p": param, "t": table}), depth)
    before = snapshot([param, table])
    wrapper.init_state({"t"})
    expect_unchanged(before, [param, table], "parameters")
    expect_equal([one.grad.is_sparse for one in (param, table)], [False, True], "sparse gradients")
    for one in (param, table):
        expect_bits(one.grad.to_dense(), torch.zeros_like(one), "the gradient that is left")
    wrapper, _, params = wrapped_adam(impl, depth=depth)
    wrapper.init_state()
    train(wrapper, params, 3)
    plain, _, others = wrapped_adam(impl, steps=3)
    expect_equal(set(plain.state_dict()["state"]), {"p", "q"}, "keys of the state")
    for one, other in zip(params, others, strict=True):
        expect_bits(one, other, "a parameter after three steps")


@pytest.mark.clause("WRAP-021")
@pytest.mark.parametrize("kind", ["DTensor", "ShardedTensor"])
def test_sharded_state_is_loaded_in_place(impl, kind):
    """DTensor and ShardedTensor state is saved unchanged and loaded in place."""
    from torch.distributed import tensor as dtensor
    from torch.distributed._shard import sharded_tensor, sharding_spec
    from torch.distributed.device_mesh import init_device_mesh

    def sharded(value):
        if kind == "DTensor":
            data = full((4, 2), value)
            return dtensor.distribute_tensor(
                data, init_device_mesh(the_device().type, (1,)), [dtensor.Shard(0)]
            )
        spec = sharding_spec.ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
        return sharded_tensor.full(spec, (4, 2), fill_value=value)

    def local(value):
        return value.to_local() if kind == "DTensor" else value.local_shards()[0].tensor

    with single_rank():
        param = parameter(4, 2)
        live = sharded(0.0)
        wrapper = wrap_plainly(impl, impl.KeyedOptimizer({"p": param}, {param: {"m": live}}, []), 2)
        saved = wrapper.state_dict()["state"]["p"]["m"]
        expect(saved is live, f"the live {kind}", saved)
        memory = local(live).data_ptr()
        wrapper.load_state_dict({"state": {"p": {"m": sharded(2.0)}}})
        expect_bits(local(live), torch.full((4, 2), 2.0), "the loaded shard")
        expect_equal(local(live).data_ptr(), memory, "memory of the shard")


@pytest.mark.clause("WRAP-022")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_group_is_added_through_a_wrapper(impl, depth):
    """A group with keys is added to the wrapped optimizer, which trains and saves it."""
    wrapper, _, params = wrapped_adam(impl, steps=1, depth=depth)
    late = parameter(2, seed=7)
    value = late.detach().clone()
    try:
        wrapper.add_param_group({"params": {"r": late}, "lr": 0.5})
    except (TypeError, ValueError):  # the document does not say how keys are passed
        wrapper.add_param_group({"params": [("r", late)], "lr": 0.5})
    expect_equal(list(wrapper.params), ["p", "q", "r"], "keys of params")
    expect_equal(len(list(wrapper.param_groups)), 2, "number of groups")
    expect_equal(list(wrapper.param_groups)[1]["lr"], 0.5, "learning rate of the added group")
    train(wrapper, [*params, late], 1)
    expect(not torch.equal(late, value), "a parameter that is trained", late.tolist())
    expect_equal(set(wrapper.state_dict()["state"]), {"p", "q", "r"}, "keys of the saved state")


@pytest.mark.clause("WRAP-023")
@pytest.mark.parametrize("how", ["no key", "known key", "known parameter", "no params", "no mapping"])
def test_a_group_that_does_not_fit_is_refused(impl, how):
    """A group without keys, or with a known key or parameter, raises an error."""
    wrapper, _, params = wrapped_adam(impl, steps=1)
    before = snapshot(wrapper.state_dict()["state"])
    late = parameter(2, seed=7)
    group: Any = {
        "no key": {"params": [late]},
        "known key": {"params": {"p": late}},
        "known parameter": {"params": {"r": params[1]}},
        "no params": {"lr": 0.5},
        "no mapping": [late],
    }[how]
    expect_raises(lambda: wrapper.add_param_group(group), Exception, expected="an error for the group")
    expect_equal(list(wrapper.params), ["p", "q"], "keys of params")
    expect_equal(len(list(wrapper.param_groups)), 1, "number of groups")
    expect_unchanged(before, wrapper.state_dict()["state"], "the state")


@pytest.mark.clause("WRAP-024")
@pytest.mark.parametrize("depth", [1, 2])
def test_steps_and_hyper_parameters_are_passed_on(impl, depth):
    """set_optimizer_step and update_hyper_parameters reach the wrapped optimizer."""

    class Told(impl.KeyedOptimizerWrapper):
        heard: Any = ()

        def set_optimizer_step(self, step):
            self.heard = (*self.heard, step)

        def update_hyper_parameters(self, params_dict):
            self.heard = (*self.heard, params_dict["lr"])

    told = Told({"p": parameter(2)}, torch.optim.Adagrad)
    bare = impl.KeyedOptimizer({}, {}, [])
    for wrapper in (wrap_plainly(impl, told, depth), wrap_plainly(impl, bare, depth)):
        wrapper.set_optimizer_step(7)
        wrapper.update_hyper_parameters({"lr": 0.25})
    expect_equal(told.heard, (7, 0.25), "calls that reached the wrapped optimizer")
