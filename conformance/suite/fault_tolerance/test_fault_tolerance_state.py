"""State, groups, hooks and copies of a fault-tolerant optimizer."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_close,
    expect_equal,
    expect_raises,
    expect_unchanged,
    outcome,
    snapshot,
)
from keyedopt.conformance.suite.support.device import arange, linear, on_host, tensor, the_device
from keyedopt.conformance.suite.support.inputs import parameter, parameters, set_grads, train, values
from keyedopt.conformance.suite.support.replicas import ScriptedManager, torch_optimizer


def wrap(impl: Any, params: Any, kind: str = "Adam", commits: Any = ()) -> tuple[Any, Any]:
    """Make an optimizer and a fault-tolerant optimizer around it."""
    inner = torch_optimizer(kind, params)
    return impl.FaultTolerantOptimizer(ScriptedManager(commits), inner), inner


# --- saving and loading ---------------------------------------------------------------------------


@pytest.mark.clause("FT-019")
def test_state_dict(impl, dtype):
    """state_dict returns the keys and the live tensors of the wrapped optimizer's state_dict."""
    params = parameters(dtype=dtype)
    optimizer, inner = wrap(impl, params)
    train(optimizer, params, 2)
    saved, expected = optimizer.state_dict(), inner.state_dict()
    expect_unchanged(snapshot(expected), saved, "state dict")
    for number, entry in expected["state"].items():
        for key, value in entry.items():
            expect(
                saved["state"][number][key] is value, f"the live tensor {key}", saved["state"][number][key]
            )


@pytest.mark.clause("FT-020")
@pytest.mark.parametrize("kind", ["SGD", "Adam", "Adagrad"])
def test_resume(impl, kind, dtype):
    """A loaded optimizer shows the loaded state and trains like the saved one, bit by bit."""
    params, others = parameters(dtype=dtype), parameters(dtype=dtype)
    optimizer, _ = wrap(impl, params, kind)
    resumed, inner = wrap(impl, others, kind)
    optimizer.param_groups[0]["lr"] = 0.3
    train(optimizer, params, 3)
    expect_equal(len(resumed.state), len(inner.state), "entries of the state before loading")
    expect_equal(len(resumed.param_groups), 1, "groups before loading")
    resumed.load_state_dict(snapshot(optimizer.state_dict()))
    for one, other in zip(params.values(), others.values(), strict=True):
        other.data.copy_(one.data)
    expect_equal(resumed.param_groups[0]["lr"], 0.3, "learning rate after loading")
    expect_equal(len(resumed.state), 2, "entries of the state after loading")
    expect(resumed.state[others["p0"]] is inner.state[others["p0"]], "the live state", resumed.state)
    expect(resumed.param_groups[0] is inner.param_groups[0], "the live groups", resumed.param_groups)
    train(optimizer, params, 3, seed=7)
    train(resumed, others, 3, seed=7)
    expect_unchanged(values(params), values(others), "parameters")
    expect_unchanged(snapshot(optimizer.state_dict()), resumed.state_dict(), "state")


@pytest.mark.clause("FT-021")
@pytest.mark.parametrize("to", ["wrapped", "bare"])
def test_checkpoints_know_nothing_of_the_wrapper(impl, to):
    """A checkpoint can be moved between unwrapped and wrapped optimizers."""
    params, others = parameters(), parameters()
    wrapped, inner = wrap(impl, params)
    bare = torch_optimizer("Adam", others)
    source, target = (bare, wrapped) if to == "wrapped" else (wrapped, bare)
    from_params, to_params = (others, params) if to == "wrapped" else (params, others)
    train(source, from_params, 3)
    target.load_state_dict(snapshot(source.state_dict()))
    for one, other in zip(from_params.values(), to_params.values(), strict=True):
        other.data.copy_(one.data)
    train(source, from_params, 2, seed=9)
    train(target, to_params, 2, seed=9)
    expect_unchanged(values(from_params), values(to_params), "parameters")
    expect_unchanged(snapshot(bare.state_dict()), inner.state_dict(), "state")


@pytest.mark.clause("FT-022")
@pytest.mark.parametrize("wrong", ["group too many", "parameter too many", "no groups", "no mapping"])
def test_malformed_state(impl, wrong):
    """Loading state that the wrapped optimizer rejects raises an error and changes nothing."""
    params = parameters()
    optimizer, inner = wrap(impl, params)
    train(optimizer, params, 2)
    state = snapshot(inner.state_dict())
    given: Any = copy.deepcopy(state)
    if wrong == "group too many":
        given["param_groups"].append(copy.deepcopy(given["param_groups"][0]))
    elif wrong == "parameter too many":
        given["param_groups"][0]["params"].append(2)
    elif wrong == "no groups":
        del given["param_groups"]
    else:
        given = 3
    kinds = (ValueError, TypeError, KeyError, AttributeError)
    expect_raises(lambda: optimizer.load_state_dict(given), *kinds, expected="an error")
    expect_unchanged(state, inner.state_dict(), "state")


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.clause("FT-023")
def test_add_param_group(impl):
    """An added group gets the wrapped optimizer's defaults, and is trained and saved."""
    params, late = parameters(), parameter(2, seed=5)
    optimizer, inner = wrap(impl, params, commits=[True, False, True])
    train(optimizer, params, 1)
    before = values([late])
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    expect_equal(len(inner.param_groups), 2, "groups of the wrapped optimizer")
    expect_equal(len(optimizer.param_groups), 2, "groups in param_groups")
    expect_equal(optimizer.param_groups[1]["lr"], 0.5, "learning rate of the new group")
    expect_equal(optimizer.param_groups[1]["betas"], (0.9, 0.999), "default of the wrapped optimizer")
    late.grad = tensor([1.0, -2.0])
    optimizer.step()
    expect_unchanged(before, values([late]), "new parameter after a step that was not committed")
    optimizer.step()
    expect_close(late, on_host(before[0]) - torch.tensor([0.5, -0.5]), "new parameter", ulps=64)
    expect(late in optimizer.state, "state of the new parameter", list(optimizer.state))
    expect_equal(len(optimizer.state_dict()["param_groups"]), 2, "groups that are saved")


@pytest.mark.clause("FT-024")
@pytest.mark.parametrize("wrong", ["there already", "twice", "no tensor", "no params", "no mapping"])
def test_group_that_is_refused(impl, wrong):
    """Adding a group that the wrapped optimizer rejects raises an error and changes nothing."""
    params, late = parameters(), parameter(2, seed=5)
    optimizer, inner = wrap(impl, params)
    train(optimizer, params, 1)
    state = snapshot(inner.state_dict())
    group: Any = {
        "there already": {"params": [late, params["p0"]]},
        "twice": [late, late],
        "no tensor": {"params": ["late"]},
        "no params": {"lr": 0.1},
        "no mapping": 3,
    }[wrong]
    kinds = (ValueError, TypeError, KeyError, AttributeError)
    expect_raises(lambda: optimizer.add_param_group(group), *kinds, expected="an error")
    expect_unchanged(state, inner.state_dict(), "state and groups")


@pytest.mark.clause("FT-025")
def test_live_views(impl):
    """State and groups are live: a value that is set through the wrapper is used by the next step."""
    params = parameters()
    optimizer, inner = wrap(impl, params, "SGD")
    shown = optimizer.state
    set_grads(params)
    optimizer.step()
    expect(params["p0"] in shown, "the state of a later step", dict(shown))
    expect(optimizer.param_groups[0] is inner.param_groups[0], "the same group", optimizer.param_groups)
    expect(optimizer.state[params["p0"]] is inner.state[params["p0"]], "the same state", optimizer.state)
    before = values(params)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    expect_unchanged(before, values(params), "parameters after a step with lr = 0")


# --- hooks ----------------------------------------------------------------------------------------


@pytest.mark.clause("FT-026")
def test_step_hooks(impl):
    """Step hooks of the wrapper run once per committed step, before and after it, until they are removed."""
    params = parameters()
    optimizer, _ = wrap(impl, params)
    seen: list[Any] = []
    start = float(params["p0"][0].detach())
    first = optimizer.register_step_pre_hook(
        lambda one, args, kwargs: seen.append(
            ("pre", one is optimizer, float(params["p0"][0].detach()) == start)
        )
    )
    optimizer.register_step_post_hook(
        lambda one, args, kwargs: seen.append(
            ("post", one is optimizer, float(params["p0"][0].detach()) == start)
        )
    )
    set_grads(params)
    optimizer.step()
    expect_equal(
        seen, [("pre", True, True), ("post", True, False)], "hooks, their optimizer, before the step"
    )
    first.remove()
    optimizer.step()
    expect_equal([name for name, *_ in seen], ["pre", "post", "post"], "hooks")


@pytest.mark.clause("FT-027")
def test_state_dict_hooks(impl):
    """Hooks of state_dict run once per call, and the return value of a post-hook is used."""
    optimizer, _ = wrap(impl, parameters())
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda one: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda one, saved: {**saved, "extra": 1})
    expect_equal(optimizer.state_dict().get("extra"), 1, "what the post-hook added")
    expect_equal(seen, ["pre"], "pre-hooks")


@pytest.mark.clause("FT-027")
def test_load_state_dict_hooks(impl):
    """Hooks of load_state_dict run once per call, and the return value of a pre-hook is loaded."""
    params = parameters()
    optimizer, _ = wrap(impl, params)
    train(optimizer, params, 1)
    saved, seen = snapshot(optimizer.state_dict()), []
    changed = copy.deepcopy(saved)
    changed["param_groups"][0]["lr"] = 0.7
    optimizer.register_load_state_dict_pre_hook(lambda one, given: given.update(mine="alone"))
    optimizer.register_load_state_dict_pre_hook(lambda one, given: changed)
    optimizer.register_load_state_dict_post_hook(lambda one: seen.append(one.param_groups[0]["lr"]))
    optimizer.load_state_dict(saved)
    expect_equal(seen, [0.7], "learning rate that the post-hook sees")
    expect_equal(set(saved), {"state", "param_groups"}, "the caller's dict, of which hooks change a copy")


@pytest.mark.clause("FT-027")
def test_a_load_hook_changes_its_copy(impl):
    """What a pre-hook of load_state_dict writes into the dict that it gets is loaded."""
    params = parameters()
    optimizer, _ = wrap(impl, params)
    train(optimizer, params, 1)
    saved = snapshot(optimizer.state_dict())
    groups = [{**group, "lr": 0.7} for group in saved["param_groups"]]
    optimizer.register_load_state_dict_pre_hook(lambda one, given: given.update(param_groups=groups))
    optimizer.load_state_dict(saved)
    expect_equal(optimizer.param_groups[0]["lr"], 0.7, "the learning rate that the hook wrote")


@pytest.mark.clause("FT-028")
def test_hooks_of_the_wrapped_optimizer(impl):
    """The wrapped optimizer's hooks run once per committed step, save and load."""
    params = parameters()
    optimizer, inner = wrap(impl, params, commits=[True, False, True])
    seen: list[str] = []
    inner.register_step_pre_hook(lambda *_: seen.append("step"))
    inner.register_step_post_hook(lambda *_: seen.append("stepped"))
    inner.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    inner.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    for expected in (["step", "stepped"], [], ["step", "stepped"]):
        set_grads(params)
        optimizer.step()
        expect_equal(seen, expected, "hooks at a step")
        seen.clear()
    saved = snapshot(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    expect_equal(seen, ["saved", "loaded"], "hooks at a save and a load")


@pytest.mark.clause("FT-029")
def test_hooks_at_an_uncommitted_step(impl):
    """Observe which step hooks of the wrapper run in a step that is not committed."""
    params = parameters()
    optimizer, _ = wrap(impl, params, commits=[False])
    seen: list[str] = []

    def register() -> None:
        optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
        optimizer.register_step_post_hook(lambda *_: seen.append("post"))

    registered = outcome(register)
    set_grads(params)
    if registered == "returns None":
        optimizer.step()
    return [registered, *seen]


# --- schedulers, scalers and checkpoints ----------------------------------------------------------


@pytest.mark.clause("FT-030")
def test_lr_scheduler(impl):
    """A scheduler around the wrapper sets the learning rates that the wrapped optimizer uses."""
    params, others = parameters(), parameters()
    optimizer, inner = wrap(impl, params, "SGD")
    bare = torch_optimizer("SGD", others)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in (optimizer, bare)]
    for step in range(4):
        for one, given, scheduler in zip((optimizer, bare), (params, others), schedulers, strict=True):
            set_grads(given, seed=step)
            one.step()
            scheduler.step()
    expect_equal(
        inner.param_groups[0]["lr"], bare.param_groups[0]["lr"], "learning rate of the wrapped optimizer"
    )
    expect_unchanged(values(others), values(params), "parameters")


@pytest.mark.clause("FT-030")
@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR"])
def test_cyclic_schedulers(impl, scheduler):
    """Schedulers that also cycle the momentum (OneCycleLR, CyclicLR) work around the wrapper."""
    params, others = parameters(), parameters()
    optimizer, inner = wrap(impl, params, "SGD")
    bare = torch_optimizer("SGD", others)
    arguments: dict[str, Any] = {"OneCycleLR": {"total_steps": 6}, "CyclicLR": {"base_lr": 0.01}}[scheduler]
    build = getattr(torch.optim.lr_scheduler, scheduler)
    schedulers = [build(one, max_lr=0.1, **arguments) for one in (optimizer, bare)]
    for step in range(4):
        for one, given, each in zip((optimizer, bare), (params, others), schedulers, strict=True):
            set_grads(given, seed=step)
            one.step()
            each.step()
    expect_equal(inner.param_groups[0]["momentum"], bare.param_groups[0]["momentum"], "momentum")
    expect_unchanged(values(others), values(params), "parameters")


@pytest.mark.clause("FT-031")
@pytest.mark.parametrize("commits", [[True], [False]])
def test_grad_scaler(impl, commits):
    """A GradScaler unscales each gradient once before the step is committed or skipped."""
    param, other = parameter(3), parameter(3)
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager(commits), torch.optim.SGD([param], lr=0.1))
    scaler = torch.amp.GradScaler(the_device().type, init_scale=1024.0)
    optimizer.zero_grad()
    scaler.scale((param * arange(3.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    if commits == [True]:
        other.grad = arange(3.0)
        torch.optim.SGD([other], lr=0.1).step()
    expect_unchanged(values([other]), values([param]), "parameter")


@pytest.mark.clause("FT-031")
def test_grad_scaler_with_infinite_gradients(impl):
    """With an infinite gradient a GradScaler skips the step, whatever the manager decides."""
    param = parameter(3)
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager(), torch.optim.SGD([param], lr=0.1))
    scaler = torch.amp.GradScaler(the_device().type, init_scale=1024.0)
    before = values([param])
    scaler.scale((param * tensor([1.0, float("inf"), 1.0])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    expect_unchanged(before, values([param]), "parameter")
    expect_equal(scaler.get_scale(), 512.0, "scale afterwards")


@pytest.mark.clause("FT-032")
def test_distributed_checkpoint_of_a_fresh_optimizer(impl):
    """Observe the manager's calls when distributed checkpoint creates the state."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = linear(2, 1)
    manager = ScriptedManager()
    optimizer = impl.FaultTolerantOptimizer(manager, torch.optim.Adam(model.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        did = outcome(lambda: sorted(get_optimizer_state_dict(model, optimizer)))
    return [did, manager.events]


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.clause("FT-033")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("steps", [0, 2])
def test_copies(impl, how, steps):
    """A copy has the same state, shares nothing, and trains equally; the original works as before."""
    params = parameters()
    manager = ScriptedManager(())
    optimizer = impl.FaultTolerantOptimizer(manager, torch_optimizer("Adam", params))
    train(optimizer, params, steps)
    whole = (params, optimizer, manager)
    copied = copy.deepcopy(whole) if how == "deepcopy" else pickle.loads(pickle.dumps(whole))
    others, twin, its_manager = copied
    expect_unchanged(snapshot(optimizer.state_dict()), twin.state_dict(), "state of the copy")
    before = values(params)
    train(twin, others, 2, seed=5)
    expect_unchanged(before, values(params), "parameters of the original")
    train(optimizer, params, 2, seed=5)
    expect_unchanged(values(params), values(others), "parameters")
    expect_unchanged(snapshot(optimizer.state_dict()), twin.state_dict(), "state")
    its_manager.commits = [False]
    before = values(others)
    train(twin, others, 1, seed=8)
    expect_unchanged(before, values(others), "parameters of the copy after a step that was not committed")


@pytest.mark.clause("FT-033")
def test_copy_with_a_scheduler(impl):
    """A copy of a wrapper that has a scheduler steps its own parameters."""
    params = parameters()
    optimizer, _ = wrap(impl, params)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    others, twin = copy.deepcopy((params, optimizer))
    before = values(params)
    train(twin, others, 1)
    expect_unchanged(before, values(params), "parameters of the original")
    expect(not torch.equal(others["p0"].detach(), before[0]), "the copy's parameter moved", others["p0"])
