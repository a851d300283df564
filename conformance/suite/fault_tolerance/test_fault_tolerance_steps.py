"""Fault-tolerant optimizers: steps that are committed, and steps that are not."""

import warnings
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_raises,
    expect_unchanged,
    outcome,
    snapshot,
)
from keyedopt.conformance.suite.support.device import arange, ones, tensor, the_device
from keyedopt.conformance.suite.support.doubles import Recorder, single_rank
from keyedopt.conformance.suite.support.inputs import parameters, set_grads, values
from keyedopt.conformance.suite.support.replicas import ScriptedManager, saved_contents, torch_optimizer


class Scheduled(torch.optim.SGD):
    """Momentum with a learning rate that decreases with each step, which the optimizer counts itself."""

    iteration = 0

    def step(self, closure: Any = None) -> Any:
        """Set the learning rate of this iteration, step, and count."""
        for group in self.param_groups:
            group["lr"] = 0.5 / (1 + self.iteration)
        super().step(closure)
        self.iteration += 1


class Windowed(torch.optim.Optimizer):
    """Sum the gradients of three steps, then apply the sum; the window is part of the state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Add to the window, and apply the window when it is full."""
        for group in self.param_groups:
            for param in group["params"]:
                entry = self.state[param]
                if not entry:
                    entry["window"], entry["count"] = torch.zeros_like(param), 0
                entry["window"] += param.grad
                entry["count"] += 1
                if entry["count"] == 3:
                    param.sub_(entry["window"], alpha=group["lr"])
                    entry["window"].zero_()
                    entry["count"] = 0


@pytest.mark.clause("FT-004")
@pytest.mark.parametrize("arguments", [[], [True], [False]])
def test_zero_grad_resets(impl, arguments, dtype):
    """zero_grad sets gradients to None, by default too, and to zero with set_to_none=False."""
    params = parameters(dtype=dtype)
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager(), torch_optimizer("SGD", [*params.values()]))
    set_grads(params)
    params["p0"].grad.fill_(float("nan"))
    optimizer.zero_grad(*arguments)
    for key, param in params.items():
        if arguments == [False]:
            expect(param.grad is not None, f"a gradient of {key}", None)
            expect_bits(param.grad, torch.zeros_like(param), f"gradient of {key}")
        else:
            expect(param.grad is None, f"no gradient of {key}", param.grad)


@pytest.mark.clause("FT-004")
def test_zero_grad_by_keyword(impl):
    """zero_grad(set_to_none=False) sets gradients to zero."""
    params = parameters()
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager(), torch_optimizer("SGD", [*params.values()]))
    set_grads(params)
    optimizer.zero_grad(set_to_none=False)
    grad = params["p0"].grad
    expect(grad is not None, "a gradient of zeros", grad)
    expect_bits(grad, torch.zeros(3), "gradient")


@pytest.mark.clause("FT-006")
@pytest.mark.parametrize("kind", ["SGD", "Adam", "Adagrad"])
def test_committed_steps(impl, kind, dtype):
    """Committed steps give the same parameters and state as without the wrapper, bit by bit."""
    params, others = parameters(dtype=dtype), parameters(dtype=dtype)
    bare = torch_optimizer(kind, [*others.values()])
    inner = torch_optimizer(kind, [*params.values()])
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager([True] * 4), inner)
    for step in range(4):
        optimizer.zero_grad()
        for one, given in ((optimizer, params), (bare, others)):
            set_grads(given, seed=step)
            one.step()
    expect_unchanged(values(others), values(params), "parameters")
    expect_unchanged(saved_contents(bare), saved_contents(inner), "state")


@pytest.mark.clause("FT-006")
def test_sparse_and_missing_gradients(impl):
    """Sparse and missing gradients reach the wrapped optimizer unchanged."""
    params = parameters(3, (4, 2))
    recorder = Recorder([*params.values()])
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager(), recorder)
    given = torch.sparse_coo_tensor(tensor([[1, 1]]), ones(2, 2), (4, 2), check_invariants=True)
    params["p0"].grad, params["p1"].grad = given, ones(4, 2)
    optimizer.step()
    seen = recorder.received[0]
    expect(seen[0] is not None and seen[0].is_sparse, "a sparse gradient", seen[0])
    expect(not seen[0].is_coalesced(), "not coalesced by the wrapper", seen[0])
    expect_bits(seen[1], torch.ones(4, 2), "dense gradient")
    expect(seen[2] is None, "a missing gradient", seen[2])


@pytest.mark.clause("FT-035")
def test_dtensor_parameters(impl):
    """A committed step on a DTensor equals the wrapped optimizer's; an uncommitted one changes nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    with single_rank(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh(the_device().type, (1,))
        param, other = (torch.nn.Parameter(distribute_tensor(ones(4), mesh)) for _ in range(2))
        optimizer = impl.FaultTolerantOptimizer(
            ScriptedManager([True, False]), torch_optimizer("Adam", [param])
        )
        bare = torch_optimizer("Adam", [other])
        for one in (param, other):
            one.grad = distribute_tensor(arange(4.0), mesh)
        optimizer.step()
        bare.step()
        optimizer.step()
        expect_bits(param.detach().to_local(), other.detach().to_local(), "parameter")
        moment, expected = (given.state[p]["exp_avg"] for given, p in ((optimizer, param), (bare, other)))
        expect_bits(moment.to_local(), expected.to_local(), "state")


@pytest.mark.clause("FT-007")
@pytest.mark.parametrize("kind", ["SGD", "Adam", "Adagrad"])
def test_uncommitted_step(impl, kind, dtype):
    """A step that is not committed leaves parameters, state and groups bit-identical."""
    params = parameters(dtype=dtype)
    inner = torch_optimizer(kind, [*params.values()])
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager([True, False, False]), inner)
    set_grads(params)
    optimizer.step()
    before, state = values(params), saved_contents(inner)
    for _ in range(2):
        optimizer.step()
        expect_unchanged(before, values(params), "parameters")
        expect_unchanged(state, saved_contents(inner), "state")


@pytest.mark.clause("FT-008")
@pytest.mark.parametrize("commits", [[False], [True]])
def test_gradients_are_kept(impl, commits):
    """A step, committed or not, keeps the same gradient tensors, unchanged."""
    params = parameters()
    optimizer = impl.FaultTolerantOptimizer(
        ScriptedManager(commits), torch_optimizer("Adam", [*params.values()])
    )
    set_grads(params)
    grads = [param.grad for param in params.values()]
    before = snapshot(grads)
    optimizer.step()
    for grad, param in zip(grads, params.values(), strict=True):
        expect(param.grad is grad, "the same gradient tensor", param.grad)
    expect_unchanged(before, grads, "gradients")


@pytest.mark.clause("FT-009")
def test_uncommitted_first_step(impl):
    """A first step that is not committed has no effect; the next committed one is the first."""
    params, others = parameters(), parameters()
    optimizer = impl.FaultTolerantOptimizer(
        ScriptedManager([False, True]), torch_optimizer("Adam", [*params.values()])
    )
    bare = torch_optimizer("Adam", [*others.values()])
    set_grads(params)
    optimizer.step()
    expect_equal(len(optimizer.state), 0, "entries of the state")
    set_grads(params, seed=2)
    set_grads(others, seed=2)
    optimizer.step()
    bare.step()
    expect_unchanged(values(others), values(params), "parameters")
    expect_unchanged(saved_contents(bare), saved_contents(optimizer), "state")


@pytest.mark.clause("FT-010")
@pytest.mark.plain_only("its optimizer is of a class of its own")
@pytest.mark.parametrize("kind", ["schedule", "window"])
@pytest.mark.parametrize("commits", [[True, False, True, True, False, False, True]])
def test_schedule_and_window_stand_still(impl, kind, commits):
    """With uncommitted steps, the result depends only on the committed gradients."""
    params, others = parameters(), parameters()
    build = Scheduled if kind == "schedule" else Windowed
    inner, bare = build([*params.values()]), build([*others.values()])
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager(commits), inner)
    for step, committed in enumerate(commits):
        optimizer.zero_grad()
        set_grads(params, seed=step)
        optimizer.step()
        if committed:
            set_grads(others, seed=step)
            bare.step()
    expect_unchanged(values(others), values(params), "parameters")
    expect_unchanged(saved_contents(bare), saved_contents(inner), "state, with schedule and window")
    expect_equal(getattr(inner, "iteration", 0), getattr(bare, "iteration", 0), "iteration")


@pytest.mark.clause("FT-010", "WARM-050")
@pytest.mark.parametrize("commits", [[True, False, True, True, False]])
def test_keyed_tree_inside(impl, commits):
    """With warmup around clipping around keyed Adam, uncommitted steps have no effect."""
    params, others = parameters(), parameters()

    def tree(given: Any) -> Any:
        keyed = impl.KeyedOptimizerWrapper(given, lambda listed: torch.optim.Adam(listed, lr=0.1))
        clipped = impl.GradientClippingOptimizer(keyed, impl.GradientClipping.VALUE, 0.2)
        stage = impl.WarmupStage(impl.WarmupPolicy.LINEAR, max_iters=10, value=0.1)
        return impl.WarmupOptimizer(clipped, [stage], lr=0.3)

    inner, bare = tree(params), tree(others)
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager(commits), inner)
    for step, committed in enumerate(commits):
        set_grads(params, seed=step)
        grads = snapshot([param.grad for param in params.values()])
        optimizer.step()
        if committed:
            set_grads(others, seed=step)
            bare.step()
        else:
            expect_unchanged(grads, [param.grad for param in params.values()], "gradients, not clipped")
    expect_unchanged(values(others), values(params), "parameters")
    expect_unchanged(saved_contents(bare), saved_contents(optimizer), "state, by key")
    expect_equal(optimizer.param_groups[0]["lr"], bare.param_groups[0]["lr"], "learning rate of the schedule")


@pytest.mark.clause("FT-018")
def test_what_step_returns(impl):
    """Observe what step returns if it is committed, and if it is not."""
    params = parameters()
    optimizer = impl.FaultTolerantOptimizer(
        ScriptedManager([True, False]), torch_optimizer("SGD", [*params.values()])
    )
    set_grads(params)
    return [outcome(optimizer.step), outcome(optimizer.step)]


class Failing(torch.optim.SGD):
    """An optimizer whose first step raises."""

    fail = True

    def step(self, closure: Any = None) -> Any:
        """Raise before anything has changed, or step."""
        if self.fail:
            raise RuntimeError("out of memory")
        return super().step(closure)


@pytest.mark.clause("FT-006")
def test_an_error_of_the_wrapped_step_comes_out(impl):
    """A committed step that fails raises its error, and the next one succeeds."""
    params, others = parameters(), parameters()
    inner = Failing([*params.values()], lr=0.1)
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager(), inner)
    bare = torch.optim.SGD([*others.values()], lr=0.1)
    for given in (params, others):
        set_grads(given)
    expect_raises(
        optimizer.step, RuntimeError, mentions=("out of memory",), expected="the error of the wrapped step"
    )
    inner.fail = False
    optimizer.step()
    bare.step()
    expect_unchanged(values(others), values(params), "parameters after the next step")
