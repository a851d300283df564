"""Warmup: saved state, loaded state, and loads that raise errors."""

import copy
import pickle
import types
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_raises,
    expect_unchanged,
    outcome,
    snapshot,
)
from keyedopt.conformance.suite.support.described import documented_state
from keyedopt.conformance.suite.support.device import tensor, zeros
from keyedopt.conformance.suite.support.inputs import adam, parameters, sgd, train, values
from keyedopt.conformance.suite.support.warmup import (
    LINEAR_RATES,
    linear_ramp,
    schedule_state,
    set_schedule_state,
)


def expect_at(optimizer: Any, iteration: int) -> None:
    """Expect every group to have the learning rate of an iteration of the ramp."""
    for group in optimizer.param_groups:
        expect_close(group["lr"], LINEAR_RATES[iteration], f"lr at iteration {iteration}", ulps=8)


def trained(impl: Any, steps: int, build: Any = sgd, **options: Any) -> tuple[Any, Any]:
    """Make parameters and a ramp around an optimizer, and take steps."""
    params = parameters()
    optimizer = linear_ramp(impl, build(impl, dict(params), **options))
    train(optimizer, params, steps)
    return params, optimizer


def warmup_state(impl: Any, optimizer: Any) -> torch.Tensor:
    """Return the saved state of the schedule."""
    return schedule_state(impl, optimizer.state_dict())


# --- saving ---------------------------------------------------------------------------------------


@pytest.mark.clause("WARM-041")
@pytest.mark.parametrize("name", ["__warmup", "schedule"])
def test_state_has_a_name(impl, name):
    """The schedule's state is saved under param_name, the key of a parameter that it adds."""
    params = parameters()
    optimizer = linear_ramp(impl, sgd(impl, dict(params)), param_name=name)
    train(optimizer, params, 1)
    expect(name in optimizer.params, f"a parameter {name!r}", list(optimizer.params))
    saved = optimizer.state_dict()["state"]
    expect(name in saved, f"state under {name!r}", list(saved))
    expect(optimizer.params[name] in optimizer.state, f"the parameter {name!r} in state", "none")


@pytest.mark.clause("WARM-042")
def test_saved_state_is_live(impl):
    """An earlier state dict shows the current iteration, like all other state."""
    params, optimizer = trained(impl, 1, momentum=0.9)
    saved = optimizer.state_dict()["state"]
    for iteration in range(2, 7):
        train(optimizer, params, 1)
        momentum = saved["p0"]["momentum_buffer"]
        expect_bits(momentum, optimizer.state[params["p0"]]["momentum_buffer"], "momentum")
        seen = schedule_state(impl, {"state": saved}).tolist()
        expect_equal(seen, [iteration, int(iteration > 4)], "state in the earlier state dict")
    schedule_state(impl, {"state": saved}).copy_(tensor([2, 0]))
    expect_equal(warmup_state(impl, optimizer).tolist(), [2, 0], "state written through the state dict")


@pytest.mark.clause("WARM-042")
@pytest.mark.parametrize("steps", [1, 5])
def test_load_keeps_the_tensor(impl, steps):
    """A load fills the state tensor in place and shares nothing with the loaded state dict."""
    _, source = trained(impl, 3)
    params, optimizer = trained(impl, steps)
    live = warmup_state(impl, optimizer)
    saved = source.state_dict()
    optimizer.load_state_dict(saved)
    expect(warmup_state(impl, optimizer).data_ptr() == live.data_ptr(), "the same tensor", "another")
    expect_equal(live.tolist(), [3, 0], "state in the tensor")
    train(optimizer, params, 1)
    expect_equal(warmup_state(impl, source).tolist(), [3, 0], "state of the optimizer it came from")


@pytest.mark.clause("WARM-043")
def test_state_before_the_first_step(impl):
    """Observe what is saved before the first step."""
    _, optimizer = trained(impl, 0)
    return outcome(lambda: sorted(optimizer.state_dict()["state"]))


@pytest.mark.clause("WARM-044")
@pytest.mark.parametrize("kind", ["dict", "read-only"])
def test_callers_parameters_are_left_alone(impl, kind):
    """The caller's mapping of parameters is not modified and may be read-only."""
    params = parameters()
    given = params if kind == "dict" else types.MappingProxyType(params)
    optimizer = linear_ramp(impl, sgd(impl, given))
    train(optimizer, params, 2)
    expect_at(optimizer, 2)
    expect_equal(list(params), ["p0", "p1"], "keys of the caller's mapping")


@pytest.mark.clause("WARM-045")
@pytest.mark.parametrize("kind", ["parameter", "schedule", "combined"])
def test_names_do_not_clash(impl, kind):
    """A param_name that is already a key raises ValueError and changes nothing."""
    params = parameters()
    name = "p1"
    inner = sgd(impl, dict(params), lr=9.0)
    if kind == "schedule":
        name = "__warmup"
        inner = linear_ramp(impl, inner)
    elif kind == "combined":
        name = "a.p1"
        inner = impl.CombinedOptimizer([("a", inner)])
    before = list(inner.params)
    rates = [group["lr"] for group in inner.param_groups]
    expect_raises(
        lambda: linear_ramp(impl, inner, param_name=name, lr=0.5),
        ValueError,
        mentions=[name],
        expected=f"ValueError that names {name!r}",
    )
    expect_equal(list(inner.params), before, "keys of the wrapped optimizer")
    expect_equal([group["lr"] for group in inner.param_groups], rates, "lr")


@pytest.mark.clause("WARM-046")
def test_added_parameter_is_in_no_group(impl):
    """The added parameter is in no group: it is not optimized, clipped or saved in groups."""
    params, optimizer = trained(impl, 2)
    listed = [param for group in optimizer.param_groups for param in group["params"]]
    known = {id(param) for param in params.values()}
    expect(all(id(param) in known for param in listed), "the given parameters in groups", listed)
    optimizer.save_param_groups(True)
    groups = optimizer.state_dict()["param_groups"]
    expect_equal([group["params"] for group in groups], [["p0", "p1"]], "keys in groups")


@pytest.mark.clause("WARM-075")
@pytest.mark.parametrize("steps", [1, 3])
def test_wrapped_optimizer_keeps_its_own_state(impl, steps):
    """The inner torch optimizer has only its own state and can be saved."""
    params = parameters()
    plain = torch.optim.SGD(list(params.values()), lr=0.5, momentum=0.9)
    optimizer = linear_ramp(impl, impl.KeyedOptimizerWrapper(dict(params), lambda _: plain))
    train(optimizer, params, steps)
    expect_equal(len(plain.state), 2, "parameters with state in the torch optimizer")
    expect_equal(sorted(plain.state_dict()["state"]), [0, 1], "keys of its state")


# --- loading --------------------------------------------------------------------------------------


@pytest.mark.clause("WARM-048")
@pytest.mark.parametrize("kind", ["sgd", "adam", "sparse", "combined", "nested"])
def test_init_state_is_no_step(impl, kind):
    """init_state does not advance the schedule, whether fresh or running."""
    params = parameters()
    build = adam if kind == "adam" else sgd
    optimizer = linear_ramp(impl, build(impl, dict(params)))
    if kind == "combined":
        optimizer = impl.CombinedOptimizer([optimizer])
    elif kind == "nested":
        optimizer = impl.OptimizerWrapper(optimizer)
    sparse = {"p0"} if kind == "sparse" else None
    optimizer.init_state(sparse)
    expect_at(optimizer, 0)
    train(optimizer, params, 3)
    expect_at(optimizer, 3)
    optimizer.init_state(sparse)
    expect_at(optimizer, 3)


@pytest.mark.clause("WARM-049")
@pytest.mark.parametrize("groups", [False, True])
def test_load_sets_the_rate(impl, groups):
    """A load sets the learning rate at once and overrides the one in saved groups."""
    _, source = trained(impl, 7, momentum=0.9)
    source.save_param_groups(groups)
    saved = snapshot(source.state_dict())
    if groups:
        saved["param_groups"][0]["lr"] = 123.0
    params, optimizer = trained(impl, 1, momentum=0.9)
    optimizer.save_param_groups(groups)
    optimizer.load_state_dict(saved)
    expect_at(optimizer, 7)
    train(optimizer, params, 1)
    expect_at(optimizer, 8)


@pytest.mark.clause("WARM-054")
@pytest.mark.parametrize(
    ("state", "rate"),
    [
        ([3, 1], 0.75),
        ([3, 2], 0.75),
        ([3, 7], 0.75),
        ([4, 1], 1.0),
        ([5, 0], 0.25),
        ([12, 0], 0.6),
        ([40, 0], 1.0),
    ],
)
def test_stage_follows_from_the_iteration(impl, state, rate):
    """A checkpoint of a run with other stages resumes at this schedule's learning rate."""
    params, optimizer = trained(impl, 1)
    saved = snapshot(optimizer.state_dict())
    set_schedule_state(impl, saved, tensor(state))
    optimizer.load_state_dict(saved)
    expect_close(optimizer.param_groups[0]["lr"], rate, f"lr at iteration {state[0]}", ulps=8)
    train(optimizer, params, 1)
    after = LINEAR_RATES[state[0] + 1] if state[0] < 12 else 1.0
    expect_close(optimizer.param_groups[0]["lr"], after, "lr after one more step", ulps=8)


@pytest.mark.clause("WARM-054")
def test_integers_of_another_width(impl):
    """State of another integer dtype is loaded by value."""
    _, optimizer = trained(impl, 1)
    saved = snapshot(optimizer.state_dict())
    set_schedule_state(impl, saved, tensor([6, 1], dtype=torch.int32))
    optimizer.load_state_dict(saved)
    expect_at(optimizer, 6)
    expect_equal(warmup_state(impl, optimizer).dtype, torch.int64, "dtype of the state")


@pytest.mark.clause("WARM-055")
@pytest.mark.parametrize(
    "state",
    [
        {"warmup": [-1, 0]},
        {"warmup": [-7, 3]},
        {"warmup": [2.5, 0.0]},
        {"warmup": [float("nan"), 0.0]},
        {"warmup": [2]},
        {"warmup": [2, 0, 0]},
        {"warmup": [[2, 0], [2, 0]]},
        {"warmup": 2},
        {"other": [2, 0]},
        {},
        {"warmup": [2, 0], "more": [1]},
        None,
    ],
    ids=str,
)
def test_malformed_state_is_refused(impl, state):
    """Loading malformed schedule state raises ValueError and changes nothing."""
    params, optimizer = trained(impl, 3, momentum=0.9)
    saved = snapshot(optimizer.state_dict())
    schedule_state(impl, saved)  # else the case is unsupported
    for entry in saved["state"].values():
        if "momentum_buffer" in entry:
            entry["momentum_buffer"] += 1
    if state is None:
        del saved["state"]["__warmup"]
    else:
        own = documented_state(impl, "WarmupOptimizer", saved["state"]["__warmup"]).own("warmup")
        named = {own if key == "warmup" else key: tensor(value) for key, value in state.items()}
        saved["state"]["__warmup"] = named
    before, weights = snapshot(optimizer.state_dict()), values(params)
    expect_raises(lambda: optimizer.load_state_dict(saved), ValueError, expected=f"ValueError for {state}")
    expect_unchanged(before, optimizer.state_dict(), "state")
    expect_unchanged(weights, values(params), "parameters")
    expect_at(optimizer, 3)
    train(optimizer, params, 1)
    expect_at(optimizer, 4)


@pytest.mark.clause("WARM-055")
def test_malformed_state_in_place_is_refused(impl):
    """A negative iteration that was written in place raises when it is used."""
    _, optimizer = trained(impl, 3)
    warmup_state(impl, optimizer)[0] = -5
    expect_raises(optimizer.post_load_state_dict, ValueError, expected="ValueError for iteration -5")
    expect_at(optimizer, 3)


@pytest.mark.clause("WARM-056")
@pytest.mark.parametrize("kind", ["shape", "missing", "uninitialized"])
def test_refused_load_leaves_the_schedule(impl, kind):
    """If the wrapped optimizer rejects a load, the schedule does not change."""
    _, source = trained(impl, 7, momentum=0.9)
    saved = snapshot(source.state_dict())
    params, optimizer = trained(impl, 0 if kind == "uninitialized" else 2, momentum=0.9)
    if kind == "shape":
        saved["state"]["p1"]["momentum_buffer"] = zeros(5)
    elif kind == "missing":
        del saved["state"]["p1"]
    steps = 0 if kind == "uninitialized" else 2
    expect_raises(lambda: optimizer.load_state_dict(saved), Exception, expected=f"an error: {kind}")
    expect_at(optimizer, steps)
    train(optimizer, params, 1)
    expect_at(optimizer, steps + 1)
    expect_equal(warmup_state(impl, optimizer).tolist(), [steps + 1, 0], "state of the schedule")


@pytest.mark.clause("WARM-057")
def test_state_that_was_loaded_in_place(impl):
    """State that was written in place takes effect with post_load_state_dict."""
    params, optimizer = trained(impl, 1)
    warmup_state(impl, optimizer).copy_(tensor([6, 1]))
    optimizer.load_state_dict(optimizer.state_dict())
    expect_at(optimizer, 6)
    warmup_state(impl, optimizer).copy_(tensor([2, 0]))
    optimizer.post_load_state_dict()
    expect_at(optimizer, 2)
    train(optimizer, params, 1)
    expect_at(optimizer, 3)


@pytest.mark.clause("WARM-057")
def test_rate_that_was_changed_by_hand(impl):
    """A manually set learning rate lasts one step, or until post_load_state_dict."""
    params, optimizer = trained(impl, 3)
    optimizer.param_groups[0]["lr"] = 9.0
    optimizer.post_load_state_dict()
    expect_at(optimizer, 3)
    optimizer.param_groups[0]["lr"] = 0.0
    before = values(params)
    train(optimizer, params, 1)
    expect_unchanged(before, values(params), "parameters in a step with learning rate 0")
    expect_at(optimizer, 4)


@pytest.mark.clause("WARM-058")
def test_hooks_of_saving_and_loading(impl):
    """Hooks of saving and loading run once and receive the schedule's state."""
    _, optimizer = trained(impl, 3)
    seen: list[Any] = []

    def before_load(_: Any, state_dict: Any) -> Any:
        seen.append("load")
        changed = snapshot(state_dict)
        set_schedule_state(impl, changed, tensor([6, 1]))
        return changed

    optimizer.register_state_dict_pre_hook(lambda _: seen.append("save"))
    optimizer.register_state_dict_post_hook(
        lambda _, state_dict: seen.append(schedule_state(impl, state_dict).tolist())
    )
    optimizer.register_load_state_dict_pre_hook(before_load)
    optimizer.register_load_state_dict_post_hook(lambda loaded: seen.append(loaded.param_groups[0]["lr"]))
    saved = optimizer.state_dict()
    expect_equal(seen, ["save", [3, 0]], "hooks that ran when saving")
    optimizer.load_state_dict(saved)
    expect_at(optimizer, 6)
    expect_equal(seen[2:], ["load", optimizer.param_groups[0]["lr"]], "hooks that ran when loading")


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.clause("WARM-059")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("steps", [0, 3, 6])
def test_copies_go_on_by_themselves(impl, how, steps):
    """A copy continues from the same iteration and does not affect the original."""
    params, optimizer = trained(impl, steps, adam)
    saved = copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    others = [twin.params[key] for key in params]
    expect_at(twin, steps)
    weights = values(params)
    train(twin, others, 2)
    expect_at(twin, steps + 2)
    expect_at(optimizer, steps)
    expect_unchanged(weights, values(params), "parameters of the original")
    expect_unchanged(saved, optimizer.state_dict(), "state of the original")
    train(optimizer, params, 2)
    for one, other in zip(params.values(), others, strict=True):
        expect_bits(other, one, "parameter of the copy")
    expect_unchanged(snapshot(optimizer.state_dict()), twin.state_dict(), "state of the copy")
