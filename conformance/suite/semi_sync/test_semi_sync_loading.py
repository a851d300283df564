"""Semi-synchronous training: loading, errors, groups, hooks, compositions."""

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
from keyedopt.conformance.suite.support.device import full, tensor, zeros
from keyedopt.conformance.suite.support.inputs import adam, parameters, set_grads, sgd, train, warmup_stages
from keyedopt.conformance.suite.support.replicas import (
    GLOBAL_COUNTER,
    LOCAL_COUNTER,
    Outer,
    copy_weights,
    expect_alike,
    semisync,
)
from keyedopt.conformance.suite.support.wrapper import record_load


def snapshot_groups(saved: Any) -> Any:
    """Clone a saved state, including groups."""
    return {
        "state": snapshot(saved["state"]),
        "param_groups": [dict(group) for group in saved["param_groups"]],
    }


def compose(impl: Any, kind: str, params: Any) -> Any:
    """Build semi-synchronous training inside and around other optimizers."""
    stages = [{"policy": "LINEAR", "max_iters": 20, "value": 0.1}]
    if kind == "warmup inside":
        local = impl.WarmupOptimizer(adam(impl, params), warmup_stages(impl, stages), lr=0.3)
        return semisync(impl, params, local=local)[0]
    if kind == "clipping inside":
        local = impl.GradientClippingOptimizer(adam(impl, params), impl.GradientClipping.VALUE, 0.2)
        return semisync(impl, params, local=local)[0]
    if kind == "combined inside":
        local = impl.CombinedOptimizer([adam(impl, {key: param}) for key, param in params.items()])
        return semisync(impl, params, local=local)[0]
    if kind == "in a wrapper":
        return impl.OptimizerWrapper(semisync(impl, params)[0])
    if kind == "in a warmup":
        return impl.WarmupOptimizer(semisync(impl, params)[0], warmup_stages(impl, stages), lr=0.3)
    assert kind == "in a combination", kind
    both = [("a", "p0"), ("b", "p1")]
    return impl.CombinedOptimizer(
        [(name, semisync(impl, {key: params[key]}, every=2)[0]) for name, key in both]
    )


@pytest.mark.clause("SEMI-018")
@pytest.mark.parametrize(
    "wrong",
    [
        "no counters",
        "no local counter",
        "counters differ",
        "negative counter",
        "counter is no number",
        "parameter missing",
        "parameter too many",
        "local state missing",
        "global state missing",
        "all global state missing",
        "key too many",
        "key without prefix",
        "key too many, without prefix",
        "shape",
        "global shape",
        "empty",
        "empty entry too many",
        "entry is no mapping",
        "no state",
        "no mapping",
    ],
)
def test_malformed_state(impl, wrong):
    """Loading state that does not fit raises ValueError and changes neither optimizer."""
    params, others = parameters(), parameters()
    optimizer, saved = semisync(impl, params, every=2)[0], semisync(impl, others, every=2)[0]
    train(optimizer, params, 4)
    train(saved, others, 7, seed=30)
    given: Any = snapshot(saved.state_dict())
    state, entry = given["state"], given["state"]["p1"]
    if wrong == "no counters":
        for each in state.values():
            del each[LOCAL_COUNTER], each[GLOBAL_COUNTER]
    elif wrong == "no local counter":
        del entry[LOCAL_COUNTER]
    elif wrong == "counters differ":
        entry[LOCAL_COUNTER] = tensor(3)
    elif wrong == "negative counter":
        for each in state.values():
            each[LOCAL_COUNTER] = tensor(-3)
    elif wrong == "counter is no number":
        for each in state.values():
            each[LOCAL_COUNTER] = tensor([3, 4])
    elif wrong == "parameter missing":
        del state["p1"]
    elif wrong == "parameter too many":
        state["p2"] = dict(entry)
    elif wrong == "local state missing":
        del entry["semi_sync_local_exp_avg"]
    elif wrong == "global state missing":
        for key in [key for key in entry if key.startswith("semi_sync_global_")]:
            del entry[key]
    elif wrong == "all global state missing":
        # The counters, which say that there was some, have entries of their own.
        for each in state.values():
            counters = {name: each.pop(name) for name in (LOCAL_COUNTER, GLOBAL_COUNTER)}
            for key in [key for key in each if key.startswith("semi_sync_global_")]:
                del each[key]
        state.update({name: {name: value} for name, value in counters.items()})
    elif wrong == "key too many":
        entry["semi_sync_local_more"] = zeros(3)
    elif wrong == "key without prefix":
        entry["momentum"] = entry.pop("semi_sync_global_momentum")
    elif wrong == "key too many, without prefix":
        entry["momentum"] = zeros(3)
    elif wrong == "shape":
        entry["semi_sync_local_exp_avg"] = zeros(1)
    elif wrong == "global shape":
        entry["semi_sync_global_momentum"] = zeros(1)
    elif wrong == "empty":
        given["state"] = {}
    elif wrong == "empty entry too many":
        state["p2"] = {}
    elif wrong == "entry is no mapping":
        state["p1"] = 3
    elif wrong == "no state":
        del given["state"]
    else:
        given = [given]
    before = snapshot(optimizer.state_dict())
    expect_raises(lambda: optimizer.load_state_dict(given), ValueError, expected="a ValueError")
    expect_unchanged(before, optimizer.state_dict(), "state")


@pytest.mark.clause("SEMI-019")
@pytest.mark.parametrize("kind", ["unlike", "alike"])
def test_groups(impl, kind):
    """With save_param_groups(True) the groups of both are saved, and each is loaded into its optimizer."""

    def make() -> Any:
        params = parameters()
        local = sgd(impl, params)
        if kind == "alike":  # the same parameters and the same options

            def factory(listed: Any) -> Outer:
                return Outer(listed, lr=0.1, momentum=0.9)

            local = impl.KeyedOptimizerWrapper(params, factory)
        return params, semisync(impl, params, every=1, local=local)

    (params, (optimizer, *members)), (others, (resumed, local, outer)) = make(), make()
    for one in (optimizer, resumed):
        one.save_param_groups(True)
    for one, given in ((optimizer, params), (resumed, others)):
        train(one, given, 2)
    for one, rate in zip(members, (0.3, 0.6), strict=True):
        next(iter(one.param_groups))["lr"] = rate
    saved = snapshot_groups(optimizer.state_dict())
    expect_equal(
        sorted(group["lr"] for group in saved["param_groups"]), [0.3, 0.6], "learning rates that are saved"
    )
    resumed.load_state_dict(saved)
    rates = [next(iter(one.param_groups))["lr"] for one in (local, outer)]
    expect_equal(rates, [0.3, 0.6], "learning rates of the local and the global optimizer")


@pytest.mark.clause("SEMI-019")
def test_groups_are_found_by_their_keys(impl):
    """Keys of a group may be reordered, and the loaded state dict is not modified."""
    params = parameters()
    optimizer, *members = semisync(impl, params, every=1, local=sgd(impl, params))
    optimizer.save_param_groups(True)
    train(optimizer, params, 2)

    def set_rates(*given: float) -> None:
        for one, rate in zip(members, given, strict=True):
            next(iter(one.param_groups))["lr"] = rate

    set_rates(0.3, 0.6)
    saved = snapshot_groups(optimizer.state_dict())
    for group in saved["param_groups"]:
        group["params"] = ["p1", "p0"]
    groups = list(saved["param_groups"])
    set_rates(0.9, 0.9)
    optimizer.load_state_dict(saved)
    rates = [next(iter(one.param_groups))["lr"] for one in members]
    expect_equal(rates, [0.3, 0.6], "learning rates of the local and the global optimizer")
    expect_equal(len(saved["param_groups"]), 2, "groups of what was loaded")
    for group, before in zip(saved["param_groups"], groups, strict=True):
        expect(group is before, "the same groups of what was loaded", group)
        expect_equal(group["params"], ["p1", "p0"], "keys of a group that was loaded")


@pytest.mark.clause("SEMI-019")
@pytest.mark.parametrize("wrong", ["none", "one too few", "other parameters"])
def test_malformed_groups(impl, wrong):
    """Loading groups that do not fit raises an error and changes nothing."""
    params = parameters()
    optimizer = semisync(impl, params, every=1, local=sgd(impl, params))[0]
    optimizer.save_param_groups(True)
    train(optimizer, params, 2)
    given: Any = snapshot_groups(optimizer.state_dict())
    for group in given["param_groups"]:
        group["lr"] = 0.9
    if wrong == "none":
        del given["param_groups"]
    elif wrong == "one too few":
        given["param_groups"].pop()
    else:
        given["param_groups"][1]["params"] = ["p0"]
    before = snapshot_groups(optimizer.state_dict())
    expect_raises(lambda: optimizer.load_state_dict(given), ValueError, KeyError, expected="an error")
    now = snapshot_groups(optimizer.state_dict())
    expect_unchanged(before["state"], now["state"], "state")
    seen = [group["lr"] for group in now["param_groups"]]
    expect_equal(seen, [group["lr"] for group in before["param_groups"]], "rates")


@pytest.mark.clause("SEMI-037")
@pytest.mark.parametrize("which", ["local", "global", "both"])
def test_groups_of_members(impl, which):
    """Optimizers that save their groups still do so inside; an error is accepted if only one does."""
    params = parameters()
    local = sgd(impl, params)

    def use() -> Any:
        outer = impl.KeyedOptimizerWrapper(params, Outer)
        for one, name in ((local, "local"), (outer, "global")):
            if which in (name, "both"):
                one.save_param_groups(True)
        optimizer = impl.SemisyncOptimizer([*params.values()], local, outer)
        train(optimizer, params, 1)
        return optimizer.state_dict()

    try:
        saved = use()
    except Exception:
        expect(which != "both", "no error if both save their groups", which)
        return
    expect("param_groups" in saved, "the groups that were to be saved", list(saved))


@pytest.mark.clause("SEMI-039")
def test_post_load_state_dict(impl):
    """A load calls post_load_state_dict of each optimizer once, after its state is written."""
    params, told = parameters(), []
    made: list[Any] = []

    class Watched(impl.KeyedOptimizerWrapper):
        """A keyed optimizer that records calls of post_load_state_dict."""

        def post_load_state_dict(self) -> None:
            """Record this optimizer and a value of its state."""
            entry = self.state[params["p0"]]
            told.append(sorted((key, float(value.sum())) for key, value in entry.items()))

    def factory(listed: Any) -> Outer:
        made.append(Outer(listed))
        return made[0]

    local = Watched(params, lambda listed: torch.optim.Adam(listed, lr=0.1))
    optimizer = impl.SemisyncOptimizer([*params.values()], local, Watched(params, factory), 1)
    train(optimizer, params, 2)
    saved = snapshot(optimizer.state_dict())
    train(optimizer, params, 1, seed=9)
    expected = [
        sorted(
            (key.removeprefix(prefix), float(value.sum()))
            for key, value in saved["state"]["p0"].items()
            if key.startswith(prefix)
        )
        for prefix in ("semi_sync_local_", "semi_sync_global_")
    ]
    optimizer.load_state_dict(saved)
    expect_equal(sorted(told), sorted(expected), "state at each post_load_state_dict")


@pytest.mark.clause("SEMI-027")
def test_state_dict_hooks(impl):
    """Hooks of state_dict run once per call, and the return value of a post-hook is used."""
    optimizer = semisync(impl, parameters())[0]
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda one: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda one, saved: {**saved, "extra": 1})
    expect_equal(optimizer.state_dict().get("extra"), 1, "what the post-hook added")
    expect_equal(seen, ["pre"], "pre-hooks")


@pytest.mark.clause("SEMI-027")
def test_load_state_dict_hooks(impl):
    """Hooks of load_state_dict run once per call, and the return value of a pre-hook is loaded."""
    params = parameters()
    optimizer = semisync(impl, params, every=1)[0]
    train(optimizer, params, 1)
    first = snapshot(optimizer.state_dict())
    train(optimizer, params, 1)
    second, seen = snapshot(optimizer.state_dict()), []
    optimizer.register_load_state_dict_pre_hook(lambda one, given: first)
    optimizer.register_load_state_dict_post_hook(lambda one: seen.append("post"))
    optimizer.load_state_dict(second)
    expect_equal(seen, ["post"], "post-hooks")
    expect_unchanged(first, optimizer.state_dict(), "state, which the pre-hook chose")


@pytest.mark.clause("SEMI-040")
@pytest.mark.parametrize("which", ["local", "global"])
def test_hooks_of_its_optimizers(impl, which):
    """Save and load hooks of either optimizer run once; their results are used and loaded."""
    params = parameters()
    local = adam(impl, params)
    outer = impl.KeyedOptimizerWrapper(params, Outer)
    optimizer = impl.SemisyncOptimizer([*params.values()], local, outer, num_local_steps=1)
    train(optimizer, params, 2)
    inside, name = (local, "exp_avg") if which == "local" else (outer, "momentum")
    calls: list[object] = []
    inside.register_state_dict_pre_hook(lambda own: calls.append("save"))
    inside.register_state_dict_post_hook(lambda own, saved: {**saved, "note": 7})
    given = copy.deepcopy(optimizer.state_dict())
    expect_equal(calls, ["save"], "calls of the state_dict pre-hook")
    calls.clear()
    record_load(inside, "p0", name, calls)
    optimizer.load_state_dict(given)
    loads = [call for call in calls if call != "save"]  # a load may read the current state
    expect_equal(loads, [7, "loaded 9.0"], "what the load pre-hook got, and what the post-hook found")


@pytest.mark.clause("SEMI-038")
@pytest.mark.parametrize("number", [0, 7])
def test_state_under_a_number(impl, number):
    """State of the local optimizer under a key that is a number is saved and loaded, too."""
    made = []
    for seed in (1, 2):
        params = parameters()
        state = {param: {number: full((3,), float(seed)), "m": zeros(3)} for param in params.values()}
        local = impl.KeyedOptimizer(params, state, [{"params": list(params.values())}])
        made.append((semisync(impl, params, local=local)[0], state))
    (optimizer, state), (loaded, others) = made
    loaded.load_state_dict(snapshot(optimizer.state_dict()))
    for entry, other in zip(state.values(), others.values(), strict=True):
        expect_bits(other[number], entry[number], f"state under {number}")


@pytest.mark.clause("SEMI-038")
@pytest.mark.parametrize(
    "kind",
    [
        "warmup inside",
        "clipping inside",
        "combined inside",
        "in a wrapper",
        "in a warmup",
        "in a combination",
    ],
)
@pytest.mark.parametrize("steps", [4, 6])
def test_compositions(impl, kind, steps):
    """Inside and around other optimizers it steps, saves its complete state, and resumes."""
    params, others = parameters(), parameters()
    optimizer, resumed = compose(impl, kind, params), compose(impl, kind, others)
    train(optimizer, params, steps)
    train(resumed, others, 3, seed=30)
    resumed.load_state_dict(snapshot(optimizer.state_dict()))
    copy_weights(params, others)
    expect_alike(optimizer, params, resumed, others, 5)


@pytest.mark.clause("SEMI-018")
def test_refused_load_in_a_combination(impl):
    """If another optimizer of a combination rejects a load, this one is unchanged."""
    params = parameters()
    whole = semisync(impl, {"p0": params["p0"]}, every=2)[0]
    combined = impl.CombinedOptimizer([("a", whole), ("b", adam(impl, {"p1": params["p1"]}))])
    train(combined, params, 5)
    given = snapshot(combined.state_dict())
    train(combined, params, 2, seed=8)
    given["state"]["b.p1"]["exp_avg"] = zeros(7)
    before = snapshot(combined.state_dict())
    set_grads(params)
    expect_raises(lambda: combined.load_state_dict(given), ValueError, expected="a ValueError")
    expect_unchanged(before, combined.state_dict(), "state")
