"""Semi-synchronous training: parameters, state, saving, and resuming."""

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    error_of,
    expect,
    expect_bits,
    expect_equal,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.described import MissingName
from keyedopt.conformance.suite.support.inputs import adam, parameter, parameters, sgd, train, values
from keyedopt.conformance.suite.support.replicas import (
    GLOBAL_COUNTER,
    LOCAL_COUNTER,
    Outer,
    copy_weights,
    expect_alike,
    semisync,
)


@pytest.mark.clause("SEMI-009")
def test_params(impl):
    """The attribute params contains both optimizers' parameters by key, as the same tensor objects."""
    params = parameters(3)
    local = adam(impl, {"p0": params["p0"], "p1": params["p1"]})
    optimizer = semisync(impl, params, local=local, outer_params={"p1": params["p1"], "p2": params["p2"]})[0]
    for key, param in params.items():
        expect(optimizer.params.get(key) is param, f"the parameter {key}", optimizer.params.get(key))


@pytest.mark.clause("SEMI-010")
def test_state(impl):
    """The attribute state contains each optimizer's live state under its prefix, and the counters."""
    params = parameters(3)
    local = adam(impl, {"p0": params["p0"], "p1": params["p1"]})
    outer_params = {"p1": params["p1"], "p2": params["p2"]}
    optimizer, _, outer = semisync(impl, params, every=2, local=local, outer_params=outer_params)
    train(optimizer, params, 3)
    local_keys = {f"semi_sync_local_{key}" for key in ("step", "exp_avg", "exp_avg_sq")}
    global_keys = {f"semi_sync_global_{key}" for key in ("step", "anchor", "momentum")}
    global_keys |= {LOCAL_COUNTER, GLOBAL_COUNTER}
    seen = {key: set(optimizer.state[param]) for key, param in params.items()}
    expected = {"p0": local_keys, "p1": local_keys | global_keys, "p2": global_keys}
    expect_equal(seen, expected, "keys of the state of each parameter")
    entry = optimizer.state[params["p1"]]
    expect_equal((int(entry[LOCAL_COUNTER]), int(entry[GLOBAL_COUNTER])), (3, 1), "counters")
    for key, value in outer.state[params["p1"]].items():
        expect(entry[f"semi_sync_global_{key}"] is value, f"the live {key}", entry[f"semi_sync_global_{key}"])
    for key, value in local.state[params["p1"]].items():
        expect(entry[f"semi_sync_local_{key}"] is value, f"the live {key}", entry[f"semi_sync_local_{key}"])


@pytest.mark.clause("SEMI-011")
def test_param_groups(impl):
    """param_groups contains the group objects of both: a learning rate that is set there takes effect."""
    params, others = parameters(), parameters()
    optimizer, local, outer = semisync(impl, params, every=1, local=sgd(impl, params))
    groups = list(optimizer.param_groups)
    expect_equal(len(groups), 2, "groups")
    for one, whose in ((local, "local"), (outer, "global")):
        group = next(iter(one.param_groups))
        expect(any(each is group for each in groups), f"the {whose} optimizer's group", groups)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(optimizer, params, 1)
    expect_unchanged(values(others), values(params), "parameters after a step with learning rates of 0")


@pytest.mark.clause("SEMI-012")
def test_state_dict(impl, dtype):
    """state_dict contains the state of both by parameter key, as live tensors, and the counters."""
    params = parameters(dtype=dtype)
    optimizer, local, outer = semisync(impl, params, every=2)
    train(optimizer, params, 5)
    saved = optimizer.state_dict()["state"]
    expect({"p0", "p1"} <= set(saved), "an entry of each parameter", list(saved))
    for key, param in params.items():
        for prefix, given in (("local", local), ("global", outer)):
            for name, value in given.state[param].items():
                seen = saved[key][f"semi_sync_{prefix}_{name}"]
                expect(seen is value, f"the live {prefix} {name}", seen)
    counters = (int(saved["p0"][LOCAL_COUNTER]), int(saved["p0"][GLOBAL_COUNTER]))
    expect_equal(counters, (5, 2), "counters")


@pytest.mark.clause("SEMI-013")
@pytest.mark.parametrize("steps", [3, 4, 5, 9])
@pytest.mark.parametrize("before", [3, 7])
def test_resume(impl, steps, before):
    """A load fills both optimizers in place, and training continues with global steps at the same time."""
    params, others = parameters(), parameters()
    optimizer, _, outer = semisync(impl, params, every=3)
    resumed, local, its_outer = semisync(impl, others, every=3)
    train(optimizer, params, steps)
    train(resumed, others, before, seed=30)
    held = [*local.state[others["p0"]].values(), *its_outer.state[others["p0"]].values()]
    given = snapshot(optimizer.state_dict())
    kept = snapshot(given)
    resumed.load_state_dict(given)
    copy_weights(params, others)
    now = [*local.state[others["p0"]].values(), *its_outer.state[others["p0"]].values()]
    expect(all(one is other for one, other in zip(held, now, strict=True)), "the same tensors", now)
    expect_unchanged(snapshot(optimizer.state_dict()), resumed.state_dict(), "state after loading")
    outer.counts.clear()
    its_outer.counts.clear()
    expect_alike(optimizer, params, resumed, others, 7)
    expect_unchanged(kept, given, "what was loaded, 7 steps later")
    expect_equal(its_outer.counts, outer.counts, "local steps at each global step")


@pytest.mark.clause("SEMI-013")
def test_resume_in_each_dtype(impl, dtype):
    """The state of each dtype is loaded bit by bit."""
    params, others = parameters(dtype=dtype), parameters(dtype=dtype)
    optimizer, resumed = semisync(impl, params, every=2)[0], semisync(impl, others, every=2)[0]
    train(optimizer, params, 5)
    train(resumed, others, 2, seed=30)
    resumed.load_state_dict(snapshot(optimizer.state_dict()))
    copy_weights(params, others)
    expect_alike(optimizer, params, resumed, others, 3)


@pytest.mark.clause("SEMI-014")
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("steps", [3, 7])
def test_init_state_makes_room_for_a_checkpoint(impl, eager, steps):
    """After init_state a fresh optimizer loads a checkpoint and resumes from it."""
    params, others = parameters(), parameters()
    optimizer, resumed = (semisync(impl, given, every=3, eager=eager)[0] for given in (params, others))
    train(optimizer, params, steps)
    resumed.init_state()
    resumed.load_state_dict(snapshot(optimizer.state_dict()))
    copy_weights(params, others)
    expect_alike(optimizer, params, resumed, others, 5)


@pytest.mark.clause("SEMI-014")
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("before", ["nothing", "init_state", "steps"])
def test_init_state_after_a_parameter_was_added(impl, eager, before):
    """init_state also makes room for the state of a parameter that both optimizers got later."""
    late = parameter(2, seed=7)
    params, others = ({**parameters(), "late": late.detach().clone().requires_grad_()} for _ in range(2))
    optimizer = semisync(impl, params, every=3, eager=eager)[0]
    early = {key: param for key, param in others.items() if key != "late"}
    members = [adam(impl, early), impl.KeyedOptimizerWrapper(early, lambda one: Outer(one, eager=eager))]
    resumed = impl.SemisyncOptimizer(list(early.values()), *members, num_local_steps=3)
    train(optimizer, params, 7)
    if before == "init_state":
        resumed.init_state()
    if before == "steps":
        train(resumed, early, 4)
    for member in members:
        if error_of(lambda member=member: member.add_param_group({"params": {"late": others["late"]}})):
            raise MissingName("no groups can be added", name="KeyedOptimizerWrapper.add_param_group")
    kept = snapshot({key: resumed.state_dict()["state"].get(key, {}) for key in early})
    resumed.init_state()
    now = resumed.state_dict()["state"]
    expect_unchanged(kept, {key: {name: now[key][name] for name in kept[key]} for key in early}, "old state")
    resumed.load_state_dict(snapshot(optimizer.state_dict()))
    copy_weights(params, others)
    expect_alike(optimizer, params, resumed, others, 5)


@pytest.mark.clause("SEMI-015")
@pytest.mark.parametrize("every", [1, 2, 3])
def test_init_state_is_no_step(impl, every):
    """init_state takes no step: parameters and the distance to the next global step are unchanged."""
    params, others = parameters(), parameters()
    optimizer, _, outer = semisync(impl, params, every=every)
    plain, _, its_outer = semisync(impl, others, every=every)
    before = values(params)
    optimizer.init_state()
    expect_unchanged(before, values(params), "parameters")
    outer.counts.clear()
    train(optimizer, params, 6)
    train(plain, others, 6)
    expect_equal(outer.counts, its_outer.counts, "local steps at each global step")
    expect_unchanged(values(others), values(params), "parameters after training")


@pytest.mark.clause("SEMI-015")
@pytest.mark.parametrize("sparse", [False, True])
def test_init_state_leaves_zero_gradients(impl, sparse):
    """init_state leaves zero gradients, sparse where named, for all parameters."""
    params = parameters(3, (3, 2))
    local = sgd(impl, params, momentum=0.9)
    both = {key: params[key] for key in ("p0", "p1")}
    optimizer = semisync(impl, params, every=2, local=local, outer_params=both, eager=False)[0]
    optimizer.init_state({"p1", "p2"} if sparse else None)
    for key, param in params.items():
        expect(param.grad is not None, f"a gradient of {key}", None)
        expect_equal(param.grad.is_sparse, sparse and key != "p0", f"sparse gradient of {key}")
        expect_bits(param.grad.to_dense(), torch.zeros(3, 2), f"gradient of {key}")


@pytest.mark.clause("SEMI-016")
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_resume_before_the_first_global_step(impl, steps):
    """A checkpoint from before the first global step resumes, at the same distance from it."""
    params, others = parameters(), parameters()
    optimizer, _, outer = semisync(impl, params, every=5, eager=False)
    resumed, _, its_outer = semisync(impl, others, every=5, eager=False)
    train(optimizer, params, steps)
    train(resumed, others, 1, seed=30)
    resumed.load_state_dict(snapshot(optimizer.state_dict()))
    copy_weights(params, others)
    expect_alike(optimizer, params, resumed, others, 6)
    expect_equal(its_outer.counts, outer.counts, "local steps at each global step")


@pytest.mark.clause("SEMI-016")
@pytest.mark.parametrize("steps", [1, 4])
def test_resume_where_all_state_is_there(impl, steps):
    """A checkpoint from before the first global step loads into initialized state, too."""
    params, others = parameters(), parameters()
    optimizer = semisync(impl, params, every=5, eager=False)[0]
    resumed, _, outer = semisync(impl, others, every=5, eager=False)
    train(optimizer, params, steps)
    saved = snapshot(optimizer.state_dict())
    resumed.init_state()
    resumed.load_state_dict(saved)
    local = [f"semi_sync_local_{name}" for name in ("exp_avg", "exp_avg_sq", "step")]
    loaded = snapshot(resumed.state_dict())
    for key in others:
        for name in local:
            expect_bits(loaded["state"][key][name], saved["state"][key][name], f"{name} of {key}")
    outer.counts.clear()
    train(resumed, others, 4 - steps)
    expect_equal(outer.counts, [], "global steps after four local ones")
    train(resumed, others, 1)
    expect_equal(outer.counts, [5], "local steps at the global step")


@pytest.mark.clause("SEMI-016")
def test_resume_after_a_global_step_of_another_run(impl):
    """Global state that an early checkpoint lacks has no effect after the load, or the load raises."""
    params, others = parameters(), parameters()
    optimizer = semisync(impl, params, every=5, eager=False)[0]
    resumed = semisync(impl, others, every=5, eager=False)[0]
    train(optimizer, params, 3)
    train(resumed, others, 6, seed=30)
    before = snapshot(resumed.state_dict())
    try:
        resumed.load_state_dict(snapshot(optimizer.state_dict()))
    except (KeyError, RuntimeError, ValueError):
        expect_unchanged(before, resumed.state_dict(), "state after a load that was refused")
        return
    copy_weights(params, others)
    expect_alike(optimizer, params, resumed, others, 6)


@pytest.mark.clause("SEMI-016")
@pytest.mark.parametrize("steps", [2, 7])
def test_resume_without_global_state(impl, steps):
    """A global optimizer without state also resumes at the same distance from its next step."""
    params, others = parameters(), parameters()
    optimizer, resumed = (semisync(impl, given, every=5, stateless=True)[0] for given in (params, others))
    train(optimizer, params, steps)
    train(resumed, others, 1, seed=30)
    resumed.load_state_dict(snapshot(optimizer.state_dict()))
    copy_weights(params, others)
    expect_alike(optimizer, params, resumed, others, 6)


@pytest.mark.clause("SEMI-006")
@pytest.mark.parametrize(("before", "after", "steps"), [(2, 5, 8), (5, 2, 5)])
def test_resume_with_other_distances(impl, before, after, steps):
    """After a load with another `num_local_steps`, global steps follow its multiples."""
    params, others = parameters(), parameters()
    optimizer, _, _ = semisync(impl, params, every=before)
    resumed, _, its_outer = semisync(impl, others, every=after)
    train(optimizer, params, steps)
    train(resumed, others, after, seed=30)
    resumed.load_state_dict(snapshot(optimizer.state_dict()))
    its_outer.counts.clear()
    train(resumed, others, 7)
    wanted = [count for count in range(steps + 1, steps + 8) if count % after == 0]
    expect_equal(its_outer.counts, wanted, "local steps at each global step")


@pytest.mark.clause("SEMI-017")
def test_numbers_are_loaded(impl):
    """State that is a number instead of a tensor is loaded like the rest."""
    params, others = parameters(), parameters()
    optimizer, _, outer = semisync(impl, params, every=2, numbers=True)
    resumed, _, its_outer = semisync(impl, others, every=2, numbers=True)
    train(optimizer, params, 7)
    train(resumed, others, 2, seed=30)
    resumed.load_state_dict(snapshot(optimizer.state_dict()))
    expect_equal(outer.state[params["p0"]]["step"], 3, "global steps of the saved optimizer")
    expect_equal(its_outer.state[others["p0"]]["step"], 3, "global steps of the loaded optimizer")
