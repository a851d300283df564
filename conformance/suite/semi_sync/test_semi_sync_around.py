"""Semi-synchronous training: schedulers, scalers, clipping, hooks, copies, distributed parameters."""

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect_bits,
    expect_close,
    expect_equal,
    expect_unchanged,
    outcome,
    snapshot,
)
from keyedopt.conformance.suite.support.device import arange, full, ones, the_device
from keyedopt.conformance.suite.support.doubles import Recorder, single_rank
from keyedopt.conformance.suite.support.inputs import adam, parameters, sgd, train, values
from keyedopt.conformance.suite.support.replicas import Outer, semisync


def snapshot_of(tree: Any) -> Any:
    """Clone a nested mapping of tensors, including distributed tensors."""
    if isinstance(tree, dict):
        return {key: snapshot_of(value) for key, value in tree.items()}
    return tree.detach().clone() if isinstance(tree, torch.Tensor) else tree


@pytest.mark.clause("SEMI-030")
def test_lr_scheduler(impl):
    """A scheduler sets the learning rates of both optimizers."""
    params = parameters()
    optimizer, local, outer = semisync(impl, params)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(optimizer, params, 1)
    scheduler.step()
    rates = [next(iter(given.param_groups))["lr"] for given in (local, outer)]
    expect_equal(rates, [0.05, 0.25], "learning rates of the local and the global optimizer")


@pytest.mark.clause("SEMI-031")
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(impl, unscale):
    """A GradScaler unscales gradients once, also of shared parameters, or raises an error."""
    params, others = parameters(3), parameters(3)
    local = impl.KeyedOptimizerWrapper(
        params, lambda listed: torch.optim.SGD([{"params": [param]} for param in listed], lr=0.1)
    )
    optimizer = semisync(impl, params, local=local)[0]
    scaler = torch.amp.GradScaler(the_device().type, init_scale=1024.0)
    loss = sum((params[key] * arange(3.0)).sum() for key in ("p0", "p1"))
    scaler.scale(loss).backward()
    before = values(params)
    try:
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    except Exception:
        expect_unchanged(before, values(params), "parameters after an error")
        return
    for key in ("p0", "p1"):  # the last one has no gradient
        others[key].grad = arange(3.0)
    sgd(impl, others).step()
    expect_unchanged(values(others), values(params), "parameters")


@pytest.mark.clause("SEMI-031")
def test_grad_scaler_and_a_later_group(impl):
    """A GradScaler unscales the gradient of a parameter once that only a later group shares, or raises."""
    params, others = parameters(2), parameters(2)
    local = impl.KeyedOptimizerWrapper(
        params, lambda listed: torch.optim.SGD([{"params": [param]} for param in listed], lr=0.1)
    )
    optimizer = semisync(impl, params, local=local, outer_params={"p1": params["p1"]})[0]
    scaler = torch.amp.GradScaler(the_device().type, init_scale=1024.0)
    scaler.scale(sum((param * arange(3.0)).sum() for param in params.values())).backward()
    before = values(params)
    try:
        scaler.step(optimizer)
    except Exception:
        expect_unchanged(before, values(params), "parameters after an error")
        return
    for param in others.values():
        param.grad = arange(3.0)
    sgd(impl, others).step()
    expect_unchanged(values(others), values(params), "parameters")


@pytest.mark.clause("SEMI-031")
def test_grad_scaler_with_infinite_gradients(impl):
    """With an infinite gradient a GradScaler skips the step, which is not counted."""
    params = parameters()
    optimizer, _, outer = semisync(impl, params, every=2)
    scaler = torch.amp.GradScaler(the_device().type, init_scale=1024.0)
    before = values(params)
    for _ in range(2):
        optimizer.zero_grad()
        loss = sum((param * math.inf).sum() for param in params.values())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    expect_unchanged(before, values(params), "parameters")
    expect_equal(outer.counts, [], "global steps")
    expect_equal(scaler.get_scale(), 256.0, "scale afterwards")


@pytest.mark.clause("SEMI-032")
def test_clipping_around_it(impl):
    """Clipping around it clips each gradient once, also of parameters that both optimizers have."""
    params = parameters()
    recorder: list[Recorder] = []

    def factory(listed: Any) -> Recorder:
        recorder.append(Recorder(listed))
        return recorder[0]

    optimizer = semisync(impl, params, local=impl.KeyedOptimizerWrapper(params, factory))[0]
    clipped = impl.GradientClippingOptimizer(optimizer, impl.GradientClipping.NORM, 1.0)
    for param in params.values():
        param.grad = full((3,), 10.0)
    clipped.step()
    for seen in recorder[0].received[0]:
        expect_close(seen, torch.full((3,), 1 / math.sqrt(6)), "clipped gradient", ulps=16)


@pytest.mark.clause("SEMI-029")
@pytest.mark.parametrize("steps", [0, 2, 4])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(impl, steps, how):
    """A copy has the same state and counters, shares nothing, and trains equally, including global steps."""
    params = parameters()
    optimizer, _, outer = semisync(impl, params, every=3)
    train(optimizer, params, steps)
    whole = (params, optimizer, outer)
    others, twin, its_outer = copy.deepcopy(whole) if how == "deepcopy" else pickle.loads(pickle.dumps(whole))
    expect_unchanged(snapshot(optimizer.state_dict()), twin.state_dict(), "state of the copy")
    before, seen = values(params), [*outer.counts]
    train(twin, others, 4, seed=6)
    expect_unchanged(before, values(params), "parameters of the original")
    expect_equal(outer.counts, seen, "global steps of the original")
    train(optimizer, params, 4, seed=6)
    expect_unchanged(values(params), values(others), "parameters")
    expect_equal(its_outer.counts, outer.counts, "global steps")


@pytest.mark.clause("SEMI-029")
def test_copies_leave_others_alone(impl):
    """Copying one instance does not affect existing and later instances of the process."""
    params = parameters()
    first = semisync(impl, params)[0]
    copy.deepcopy(first)
    second = semisync(impl, params)[0]
    for optimizer in (first, second):
        train(optimizer, params, 1)


@pytest.mark.clause("SEMI-026")
def test_step_hooks(impl):
    """Step hooks run once per step, before and after it, also at a global step."""
    params = parameters()
    optimizer = semisync(impl, params, every=2)[0]
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    handle = optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    train(optimizer, params, 2)
    expect_equal(seen, ["pre", "post"] * 2, "hooks")
    handle.remove()
    train(optimizer, params, 1)
    expect_equal(seen[4:], ["pre"], "hooks after one was removed")


@pytest.mark.clause("SEMI-028")
def test_hooks_of_the_local_optimizer(impl):
    """Step hooks of the local optimizer and its inner torch optimizer run once per step."""
    params = parameters()
    made: list[torch.optim.Optimizer] = []

    def factory(listed: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(listed, lr=0.1))
        return made[0]

    optimizer = semisync(impl, params, every=2, local=impl.KeyedOptimizerWrapper(params, factory))[0]
    seen: list[str] = []
    made[0].register_step_pre_hook(lambda *_: seen.append("pre"))
    made[0].register_step_post_hook(lambda *_: seen.append("post"))
    train(optimizer, params, 2)
    expect_equal(seen, ["pre", "post"] * 2, "hooks")


@pytest.mark.clause("SEMI-025")
def test_hooks_of_the_global_optimizer(impl):
    """Observe which step hooks of the global optimizer and its inner one run at a global step."""
    params = parameters()
    made: list[Outer] = []

    def factory(listed: Any) -> Outer:
        made.append(Outer(listed))
        return made[0]

    outer = impl.KeyedOptimizerWrapper(params, factory)
    optimizer = impl.SemisyncOptimizer([*params.values()], adam(impl, params), outer, 2)
    seen: list[str] = []
    registered = outcome(lambda: bool(outer.register_step_pre_hook(lambda *_: seen.append("keyed"))))
    made[0].register_step_pre_hook(lambda *_: seen.append("inside"))
    train(optimizer, params, 2)
    return [registered, *seen]


@pytest.mark.clause("SEMI-020")
def test_dtensor_parameters(impl):
    """DTensor parameters are stepped, saved and loaded as by the two optimizers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    with single_rank(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh(the_device().type, (1,))

        def make(seed: int) -> Any:
            whole = arange(4.0) + seed
            params = {"p": torch.nn.Parameter(distribute_tensor(whole, mesh))}
            return params, semisync(impl, params, every=2, local=sgd(impl, params, momentum=0.9))[0]

        (params, optimizer), (others, resumed) = make(0), make(1)
        for given, one in ((params, optimizer), (others, resumed)):
            for _ in range(3):
                given["p"].grad = distribute_tensor(ones(4) * (1 if one is optimizer else 2), mesh)
                one.step()
        resumed.load_state_dict(snapshot_of(optimizer.state_dict()))
        expected, seen = optimizer.state_dict()["state"]["p"], resumed.state_dict()["state"]["p"]
        for key in (
            "semi_sync_local_momentum_buffer",
            "semi_sync_global_momentum",
            "semi_sync_global_anchor",
        ):
            expect_bits(seen[key].to_local(), expected[key].to_local(), key)
