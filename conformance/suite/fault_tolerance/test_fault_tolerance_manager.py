"""Which calls a fault-tolerant optimizer makes to its manager, and when; updates in the backward pass."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_equal,
    expect_raises,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.device import arange
from keyedopt.conformance.suite.support.doubles import Recorder
from keyedopt.conformance.suite.support.inputs import parameter, parameters, set_grads, values
from keyedopt.conformance.suite.support.replicas import ScriptedManager, saved_contents, torch_optimizer


class Both(torch.optim.Optimizer):
    """Two optimizers as one."""

    def __init__(self, one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
        self.both = (one, other)
        super().__init__([group for optimizer in self.both for group in optimizer.param_groups], {})

    def step(self, closure: Any = None) -> Any:
        """Step both."""
        for optimizer in self.both:
            optimizer.step()


class Refusing(ScriptedManager):
    """A manager that raises because too many steps have failed."""

    def start_quorum(self) -> None:
        """Raise."""
        raise RuntimeError("no quorum")

    def should_commit(self) -> bool:
        """Raise."""
        raise RuntimeError("too many failures")


class Healing(ScriptedManager):
    """A manager that restores this replica, which has fallen behind, when it is asked to commit."""

    def __init__(self, heal: Any) -> None:
        super().__init__()
        self.heal = heal

    def should_commit(self) -> bool:
        """Load, and commit."""
        self.heal()
        return super().should_commit()


@pytest.mark.clause("FT-001")
def test_it_is_an_optimizer(impl):
    """It takes a manager and an optimizer, is a torch optimizer, and does not call the manager yet."""
    params, manager = parameters(), ScriptedManager()
    optimizer = impl.FaultTolerantOptimizer(manager, torch_optimizer("Adam", [*params.values()]))
    expect(isinstance(optimizer, torch.optim.Optimizer), "a torch.optim.Optimizer", type(optimizer).__mro__)
    expect_equal(manager.events, [], "calls to the manager")
    by_name = impl.FaultTolerantOptimizer(manager=manager, optim=torch_optimizer("Adam", [*params.values()]))
    expect_equal(len(by_name.param_groups), 1, "groups")


@pytest.mark.clause("FT-002")
@pytest.mark.parametrize("wrong", ["swapped", "no manager", "no optimizer", "parameters"])
def test_wrong_arguments(impl, wrong):
    """Invalid arguments raise an error, at the latest when a step begins, and nothing changes."""
    params, manager = parameters(), ScriptedManager()
    inner = torch_optimizer("SGD", [*params.values()])
    set_grads(params)
    before = values(params)
    arguments: dict[str, Any] = {
        "swapped": (inner, manager),
        "no manager": (None, inner),
        "no optimizer": (manager, None),
        "parameters": (manager, [*params.values()]),
    }

    def use() -> None:
        optimizer = impl.FaultTolerantOptimizer(*arguments[wrong])
        optimizer.zero_grad()

    expect_raises(use, ValueError, TypeError, AttributeError, AssertionError, expected="an error")
    expect_unchanged(before, values(params), "parameters")


@pytest.mark.clause("FT-003")
def test_zero_grad_starts_one_quorum(impl):
    """Each zero_grad starts one quorum, each step asks once; no other method calls the manager."""
    params, manager = parameters(), ScriptedManager([True, False, True])
    optimizer = impl.FaultTolerantOptimizer(manager, torch_optimizer("Adam", [*params.values()]))
    for to_none in (True, False, True):
        optimizer.zero_grad(set_to_none=to_none)
        set_grads(params)
        optimizer.step()
    optimizer.zero_grad()
    optimizer.state_dict()
    expect_equal(manager.events, ["quorum", "commit"] * 3 + ["quorum"], "calls to the manager")


@pytest.mark.clause("FT-005")
def test_quorum_that_fails(impl):
    """zero_grad raises the error of a quorum and leaves the gradients unchanged."""
    params = parameters()
    optimizer = impl.FaultTolerantOptimizer(Refusing(), torch_optimizer("SGD", [*params.values()]))
    set_grads(params)
    before = [param.grad.clone() for param in params.values()]
    expect_raises(optimizer.zero_grad, RuntimeError, mentions=["no quorum"], expected="the manager's error")
    expect_unchanged(before, [param.grad for param in params.values()], "gradients")


@pytest.mark.clause("FT-011")
@pytest.mark.parametrize("gradients", ["missing", "empty", "sparse", "dense"])
def test_asked_once_whatever_the_gradients(impl, gradients):
    """The manager is asked once per step, also if this rank has no gradient."""
    param = parameter(0 if gradients == "empty" else 3)
    manager = ScriptedManager()
    optimizer = impl.FaultTolerantOptimizer(manager, torch.optim.SGD([param], lr=0.1))
    if gradients != "missing":
        dense = torch.zeros_like(param)
        param.grad = dense.to_sparse() if gradients == "sparse" else dense
    optimizer.step()
    expect_equal(manager.events, ["commit"], "calls to the manager")


@pytest.mark.clause("FT-012")
def test_healed_while_it_is_asked(impl):
    """The step starts from the state that the manager loaded when it was asked."""
    params, others = parameters(), parameters()
    bare = torch_optimizer("Adam", [*others.values()])
    set_grads(others)
    bare.step()
    checkpoint, weights = saved_contents(bare), values(others)

    def heal() -> None:
        optimizer.load_state_dict(snapshot_of_checkpoint)
        for param, value in zip(params.values(), weights, strict=True):
            param.data.copy_(value)

    snapshot_of_checkpoint = saved_contents(bare)
    optimizer = impl.FaultTolerantOptimizer(Healing(heal), torch_optimizer("Adam", [*params.values()]))
    for given in (params, others):
        set_grads(given, seed=5)
    optimizer.step()
    bare.load_state_dict(checkpoint)
    bare.step()
    expect_unchanged(values(others), values(params), "parameters")
    expect_unchanged(saved_contents(bare), saved_contents(optimizer), "state")


@pytest.mark.clause("FT-013")
def test_manager_that_gives_up(impl):
    """A step raises an error of the manager, and nothing changes."""
    params = parameters()
    inner = torch_optimizer("SGD", [*params.values()])
    optimizer = impl.FaultTolerantOptimizer(Refusing(), inner)
    set_grads(params)
    before, state = values(params), saved_contents(inner)
    expect_raises(
        optimizer.step, RuntimeError, mentions=["too many failures"], expected="the manager's error"
    )
    expect_unchanged(before, values(params), "parameters")
    expect_unchanged(state, saved_contents(inner), "state")


@pytest.mark.clause("FT-014")
@pytest.mark.parametrize("commits", [[True], [False]])
def test_closure(impl, commits):
    """A closure raises an error, or is evaluated with gradients enabled before the manager is asked."""
    param = parameter(3)
    other = parameter(3)
    manager = ScriptedManager(commits)
    optimizer = impl.FaultTolerantOptimizer(manager, torch.optim.SGD([param], lr=0.1))

    def closure() -> torch.Tensor:
        manager.events.append("closure")
        optimizer.zero_grad()
        loss = (param * arange(3.0)).sum()
        loss.backward()
        return loss

    before = values([param])
    try:
        optimizer.step(closure)
    except Exception:
        expect_unchanged(before, values([param]), "parameter after an error")
        expect_equal(manager.events, [], "calls after a closure that raised")
        return
    expect_equal(manager.events, ["closure", "quorum", "commit"], "order of closure, quorum and commit")
    if commits == [True]:
        other.grad = arange(3.0)
        torch.optim.SGD([other], lr=0.1).step()
    expect_unchanged(values([other]), values([param]), "parameter")


@pytest.mark.clause("FT-015")
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_nonfinite_gradients(impl, value):
    """Non-finite gradients reach the optimizer unchanged if the manager commits, and not at all otherwise."""
    params = parameters()
    recorder = Recorder([*params.values()])
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager([False, True]), recorder)
    set_grads(params)
    params["p0"].grad[1] = float(value)
    before = snapshot([param.grad for param in params.values()])
    optimizer.step()
    expect_equal(len(recorder.received), 0, "steps of the wrapped optimizer")
    optimizer.step()
    expect_unchanged(before, recorder.received[0], "gradients that were received")


@pytest.mark.clause("FT-016")
@pytest.mark.parametrize("commits", [[True, False, True]])
def test_several_optimizers_at_once(impl, commits):
    """A combination that is wrapped once is committed with one call to the manager per step."""
    params, others = parameters(), parameters()

    def both(given: Any) -> Both:
        return Both(torch_optimizer("SGD", [given["p0"]]), torch_optimizer("Adam", [given["p1"]]))

    manager = ScriptedManager(commits)
    optimizer, bare = impl.FaultTolerantOptimizer(manager, both(params)), both(others)
    for step, committed in enumerate(commits):
        optimizer.zero_grad()
        set_grads(params, seed=step)
        optimizer.step()
        if committed:
            set_grads(others, seed=step)
            bare.step()
    expect_equal(manager.events, ["quorum", "commit"] * 3, "calls to the manager")
    expect_unchanged(values(others), values(params), "parameters")


@pytest.mark.clause("FT-017")
@pytest.mark.parametrize("how", ["torch", "fused", "combined", "added", "added by name"])
def test_updates_in_the_backward(impl, how):
    """An optimizer that updates in the backward pass raises an error, or its updates are deferred."""
    param, other = parameter(3), parameter(3, seed=1)

    class FusedOptimizer(torch.optim.SGD):
        """Like torchrec's: step is a no-op, and the backward pass updates."""

        def step(self, closure: Any = None) -> Any:
            """Do nothing."""

    if how.startswith(("torch", "added")):
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 0.1})
        first: dict[str, Any] = {"torch": param, "added": other, "added by name": ("other", other)}
        inner: Any = torch.optim.SGD([first[how]], lr=0.1)
    else:
        inner = FusedOptimizer([param], lr=0.1)
        param.register_post_accumulate_grad_hook(lambda leaf: [leaf.data.sub_(leaf.grad)][1:] or None)
    if how == "combined":
        inner = Both(inner, torch.optim.SGD([other], lr=0.1))
        inner.optimizers = [("", optimizer) for optimizer in inner.both]
    before = values([param])
    try:
        optimizer = impl.FaultTolerantOptimizer(ScriptedManager([False]), inner)
        if how.startswith("added"):
            optimizer.add_param_group({"params": [param if how == "added" else ("param", param)]})
    except Exception:
        return
    optimizer.zero_grad()
    param.sum().backward()
    optimizer.step()
    expect_unchanged(before, values([param]), "parameter after a step that was not committed")
