"""Combined optimizers: saving and loading, saving groups, nesting."""

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
from keyedopt.conformance.suite.support.device import full, ones, the_device, zeros
from keyedopt.conformance.suite.support.doubles import Stateful, single_rank
from keyedopt.conformance.suite.support.inputs import adam, parameter, set_grads, train, values


@pytest.mark.clause("COMB-010")
def test_state_dict_holds_all_live_state(impl):
    """The state of every optimizer is saved under the joined keys, as the live tensors."""
    combined, inner, params = combined_pair(impl, steps=2)
    saved = combined.state_dict()["state"]
    expect_equal(set(saved), {"a.p", "b.p"}, "keys of the saved state")
    for key, optimizer, param in zip(("a.p", "b.p"), inner, params, strict=True):
        live = optimizer.state[param]
        expect_equal(set(saved[key]), set(live), f"entries of {key}")
        for name, value in live.items():
            expect(saved[key][name] is value, f"the live tensor {name} of {key}", saved[key][name])
    train(combined, params, 1)
    expect_bits(saved["a.p"]["exp_avg"], inner[0].state[params[0]]["exp_avg"], "exp_avg one step later")


@pytest.mark.clause("COMB-011")
def test_a_resumed_combination_trains_on_as_the_saved_one(impl, dtype):
    """A fresh combination that loads a checkpoint takes the same steps."""
    saved, _, params = combined_pair(impl, dtype, steps=3)
    fresh, inner, fresh_params = combined_pair(impl, dtype)
    fresh.init_state()
    live = [tensor for optimizer in inner for entry in optimizer.state.values() for tensor in entry.values()]
    fresh.load_state_dict(copy.deepcopy(saved.state_dict()))
    now = [tensor for optimizer in inner for entry in optimizer.state.values() for tensor in entry.values()]
    same = all(one is other for one, other in zip(live, now, strict=True))
    expect(same, "the state tensors that were there, filled in place", "other tensors")
    with torch.no_grad():
        for param, value in zip(fresh_params, values(params), strict=True):
            param.copy_(value)
    train(saved, params, 2, seed=9)
    train(fresh, fresh_params, 2, seed=9)
    for param, other in zip(params, fresh_params, strict=True):
        expect_bits(other, param, "a parameter after two more steps")


@pytest.mark.clause("COMB-012")
@pytest.mark.parametrize("missing", [["a.p", "b.p"], ["a.p"], ["b.p"]])
def test_an_empty_state_is_not_loaded_over_an_initialized_one(impl, missing):
    """Loading state without some initialized entries raises an error."""
    combined, inner, params = combined_pair(impl, steps=1)
    given = copy.deepcopy(combined.state_dict())
    for key in missing:
        del given["state"][key]
    before = snapshot(loadable_parts(inner, params))
    expect_raises(lambda: combined.load_state_dict(given), Exception, expected="an error from the load")
    expect_unchanged(before, loadable_parts(inner, params), "the combination")


@pytest.mark.clause("COMB-012")
@pytest.mark.parametrize("stepped", [[], [0], [1]])
def test_a_full_state_is_not_loaded_over_an_empty_one(impl, stepped):
    """Loading state into uninitialized optimizers, all or one of them, raises."""
    full, _, _ = combined_pair(impl, steps=1)
    combined, inner, params = combined_pair(impl)
    for number in stepped:
        train(inner[number], [params[number]], 1)
    given = copy.deepcopy(full.state_dict())
    expect_raises(lambda: combined.load_state_dict(given), Exception, expected="an error from the load")
    for number, optimizer in enumerate(inner):
        expect_equal(len(optimizer.state), int(number in stepped), f"entries of optimizer {number}")


def damage(given: Any, how: str) -> None:
    """Make a saved state of `pair` malformed, in its last optimizer where possible."""
    state = given["state"]
    state["a.p"]["exp_avg"].fill_(9.0)  # would be written first, by a load that is not all or nothing
    if how == "no state":
        del given["state"]
    elif how == "parameter missing":
        del state["b.p"]
    elif how == "parameter unknown":
        state["c.p"] = state.pop("b.p")
    elif how == "parameter beyond":
        state["b.q"] = {"momentum_buffer": zeros(2)}
    elif how == "entry missing":
        del state["b.p"]["momentum_buffer"]
    elif how == "entry unknown":
        state["b.p"]["velocity"] = state["b.p"].pop("momentum_buffer")
    elif how == "shape":
        state["b.p"]["momentum_buffer"] = full((2, 1), 9.0)
    elif how == "kind":
        state["b.p"]["momentum_buffer"] = {"x": 1}
    elif how == "entry no mapping":
        state["b.p"] = zeros(2, 2)
    else:
        given["state"] = ["a.p", "b.p"]


@pytest.mark.clause("COMB-013")
@pytest.mark.parametrize(
    "how",
    [
        "no state",
        "parameter missing",
        "parameter unknown",
        "parameter beyond",
        "entry missing",
        "entry unknown",
        "shape",
        "kind",
        "entry no mapping",
        "state no mapping",
    ],
)
def test_a_malformed_state_is_refused_as_a_whole(impl, how):
    """State malformed for the last optimizer raises ValueError and changes nothing."""
    combined, inner, params = combined_pair(impl, steps=2)
    given = copy.deepcopy(combined.state_dict())
    damage(given, how)
    before = snapshot(loadable_parts(inner, params))
    try:
        expect_raises(
            lambda: combined.load_state_dict(given), ValueError, expected="a ValueError, nothing loaded"
        )
    finally:
        expect_unchanged(before, loadable_parts(inner, params), "a combination that refused a load")


@pytest.mark.clause("COMB-013")
@pytest.mark.plain_only("its optimizer has no groups")
def test_an_object_that_refuses_takes_the_other_optimizers_back(impl):
    """If a stateful object raises, all optimizers are restored."""
    params = [parameter(2, seed=1), parameter(2, seed=2)]
    numbers = ones(2)
    inner = [
        impl.KeyedOptimizer({"p": params[0]}, {params[0]: {"m": numbers, "n": 1.0}}, []),
        impl.KeyedOptimizer({"p": params[1]}, {params[1]: {"object": Stateful(zeros(2), refuse=True)}}, []),
    ]
    combined = impl.CombinedOptimizer([("a", inner[0]), ("b", inner[1])])
    given = copy.deepcopy(combined.state_dict())
    given["state"]["a.p"] = {"m": full((2,), 9.0), "n": 9.0}
    inner[1].state[params[1]]["object"].refuse = True
    expect_raises(lambda: combined.load_state_dict(given), ValueError, expected="a ValueError")
    expect_bits(numbers, torch.ones(2), "the tensor of the first optimizer")
    expect_equal(inner[0].state[params[0]]["n"], 1.0, "the scalar of the first optimizer")


class Notified:
    """Mix-in that records the state at each post_load_state_dict."""

    state: Any

    def post_load_state_dict(self) -> None:
        """Record the first number of the first tensor of each entry."""
        firsts = [float(tensor.reshape(-1)[0]) for entry in self.state.values() for tensor in entry.values()]
        self.__dict__.setdefault("notes", []).append(firsts)


@pytest.mark.clause("COMB-014")
def test_each_optimizer_is_told_of_a_load_once(impl):
    """post_load_state_dict of each optimizer runs once per load, after all writes."""

    class Told(Notified, impl.KeyedOptimizer):
        pass

    params = [parameter(2, seed=seed) for seed in range(3)]
    shared = [zeros(2) for _ in params]
    told = [
        Told({"p": param}, {param: {"m": tensor}}, []) for param, tensor in zip(params, shared, strict=True)
    ]
    inside = impl.CombinedOptimizer([("c", told[2])])
    combined = impl.CombinedOptimizer([("a", told[0]), ("b", told[1]), ("i", inside)])
    given = copy.deepcopy(combined.state_dict())
    for number, key in enumerate(("a.p", "b.p", "i.c.p")):
        given["state"][key]["m"].fill_(number + 1)
    combined.load_state_dict(given)
    for number, optimizer in enumerate(told):
        expect_equal(
            optimizer.__dict__.get("notes"), [[number + 1.0]], f"what optimizer {number} saw after a load"
        )
    combined.post_load_state_dict()
    for number, optimizer in enumerate(told):
        expect_equal(len(optimizer.notes), 2, f"calls of optimizer {number} after one by hand")


@pytest.mark.clause("COMB-015")
def test_nobody_is_told_of_a_refused_load(impl):
    """A load that raises runs no post_load_state_dict."""

    class Told(Notified, impl.KeyedOptimizer):
        pass

    params = [parameter(2, seed=seed) for seed in range(2)]
    told = [Told({"p": param}, {param: {"m": zeros(2)}}, []) for param in params]
    combined = impl.CombinedOptimizer([("a", told[0]), ("b", told[1])])
    given = copy.deepcopy(combined.state_dict())
    given["state"]["b.p"]["other"] = given["state"]["b.p"].pop("m")
    expect_raises(lambda: combined.load_state_dict(given), Exception, expected="an error from the load")
    for optimizer in told:
        expect_equal(optimizer.__dict__.get("notes", []), [], "calls after a failed load")


@pytest.mark.clause("COMB-021")
def test_what_an_optimizer_saves_by_its_own_methods_is_kept(impl):
    """A combined optimizer's own state_dict entries are saved, or raise."""

    class Counting(impl.KeyedOptimizerWrapper):
        count = 0

        def step(self, closure=None):
            self.count += 1
            return super().step(closure)

        def state_dict(self):
            return {**super().state_dict(), "count": self.count}

        def load_state_dict(self, state_dict):
            super().load_state_dict(state_dict)
            self.count = state_dict["count"]

    def build(param):
        counting = Counting({"p": param}, torch.optim.Adagrad)
        return impl.CombinedOptimizer([("a", counting)]), counting

    param = parameter(2)
    try:
        combined, _ = build(param)
        train(combined, [param], 3)
        given = copy.deepcopy(combined.state_dict())
    except Exception:
        return
    fresh, counting = build(parameter(2))
    fresh.load_state_dict(given)
    expect_equal(counting.count, 3, "an error, or the count that was saved")


@pytest.mark.clause("COMB-022")
@pytest.mark.parametrize("kind", ["DTensor", "ShardedTensor"])
def test_sharded_state_is_loaded_in_place(impl, kind):
    """DTensor and ShardedTensor state in a combination is loaded in place, or the load raises."""
    from torch.distributed import tensor as dtensor
    from torch.distributed._shard import sharded_tensor, sharding_spec
    from torch.distributed.device_mesh import init_device_mesh

    def sharded(values, rows=4):
        data = full((rows, 2), values)
        if kind == "DTensor":
            return dtensor.distribute_tensor(
                data, init_device_mesh(the_device().type, (1,)), [dtensor.Shard(0)]
            )
        spec = sharding_spec.ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
        return sharded_tensor.full(spec, (rows, 2), fill_value=values)

    def local(value):
        return value.to_local() if kind == "DTensor" else value.local_shards()[0].tensor

    with single_rank():
        params = [parameter(4, 2, seed=seed) for seed in range(2)]
        live = [sharded(0.0), sharded(0.0)]
        inner = [
            impl.KeyedOptimizer({"p": param}, {param: {"m": tensor}}, [])
            for param, tensor in zip(params, live, strict=True)
        ]
        combined = impl.CombinedOptimizer([("a", inner[0]), ("b", inner[1])])
        saved = combined.state_dict()["state"]
        expect(saved["b.p"]["m"] is live[1], f"the live {kind}", saved["b.p"]["m"])
        storage = [local(tensor).data_ptr() for tensor in live]
        given = {"state": {"a.p": {"m": sharded(1.0)}, "b.p": {"m": sharded(2.0)}}}
        combined.load_state_dict(given)
        for number, tensor in enumerate(live):
            expect_bits(local(tensor), torch.full((4, 2), number + 1.0), f"state of optimizer {number}")
        now = [local(tensor).data_ptr() for tensor in live]
        expect_equal(now, storage, "memory of the local shards")
        wrong = {"state": {"a.p": {"m": sharded(9.0)}, "b.p": {"m": sharded(9.0, rows=2)}}}
        expect_raises(
            lambda: combined.load_state_dict(wrong), Exception, expected="a refused load of other shards"
        )
        expect_bits(local(live[0]), torch.full((4, 2), 1.0), "state of the first optimizer")


@pytest.mark.clause("COMB-023")
def test_a_combination_of_one_steps_like_that_one(impl):
    """A combination of one optimizer steps like that optimizer on its own."""
    param, other = parameter(3), parameter(3)
    combined = impl.CombinedOptimizer([adam(impl, {"p": param})])
    alone = adam(impl, {"p": other})
    for seed in range(3):
        set_grads([param], seed=seed)
        set_grads([other], seed=seed)
        combined.step()
        alone.step()
    expect_bits(param, other, "the parameter")
