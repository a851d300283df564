"""Quorum, commit, step: what a fault-tolerant optimizer asks, and what it does with the answer."""

import warnings
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support import (
    Recorder,
    ScriptedManager,
    expect,
    expect_bits,
    expect_equal,
    expect_raises,
    expect_unchanged,
    outcome,
    parameter,
    parameters,
    set_grads,
    single_rank,
    snapshot,
    values,
)


def make(kind: str, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make an optimizer of torch by name."""
    if kind == "SGD":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)
    return getattr(torch.optim, kind)(params, lr=0.1)


def contents(optimizer: Any) -> Any:
    """Clone all that an optimizer saves: state and groups."""
    return snapshot(optimizer.state_dict())


class Scheduled(torch.optim.SGD):
    """Momentum with a rate that falls with each step, which the optimizer counts itself."""

    iteration = 0

    def step(self, closure: Any = None) -> Any:
        """Set the rate of this iteration, step, count."""
        for group in self.param_groups:
            group["lr"] = 0.5 / (1 + self.iteration)
        super().step(closure)
        self.iteration += 1


class Windowed(torch.optim.Optimizer):
    """Sum the gradients of three steps, then apply the sum; the window is state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Add to the window, and apply it when it is full."""
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
    """A manager that has had enough."""

    def start_quorum(self) -> None:
        """Refuse."""
        raise RuntimeError("no quorum")

    def should_commit(self) -> bool:
        """Refuse."""
        raise RuntimeError("too many failures")


class Healing(ScriptedManager):
    """A manager that finds, when it is asked, that this replica has fallen behind, and repairs it."""

    def __init__(self, heal: Any) -> None:
        super().__init__()
        self.heal = heal

    def should_commit(self) -> bool:
        """Load, and commit."""
        self.heal()
        return super().should_commit()


# --- what it is, and what it takes ----------------------------------------------------------------


@pytest.mark.clause("FT-001")
def test_it_is_an_optimizer(impl):
    """It is built from a manager and an optimizer, is a torch optimizer, and asks nothing yet."""
    params, manager = parameters(), ScriptedManager()
    optimizer = impl.FaultTolerantOptimizer(manager, make("Adam", [*params.values()]))
    expect(isinstance(optimizer, torch.optim.Optimizer), "a torch.optim.Optimizer", type(optimizer).__mro__)
    expect_equal(manager.events, [], "what the manager was asked")
    by_name = impl.FaultTolerantOptimizer(manager=manager, optim=make("Adam", [*params.values()]))
    expect_equal(len(by_name.param_groups), 1, "groups")


@pytest.mark.clause("FT-002")
@pytest.mark.parametrize("wrong", ["swapped", "no manager", "no optimizer", "parameters"])
def test_wrong_arguments(impl, wrong):
    """An error, at the latest when a step begins, and nothing has changed."""
    params, manager = parameters(), ScriptedManager()
    inner = make("SGD", [*params.values()])
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
    """Each zero_grad starts one quorum, each step asks once; nothing else is asked."""
    params, manager = parameters(), ScriptedManager([True, False, True])
    optimizer = impl.FaultTolerantOptimizer(manager, make("Adam", [*params.values()]))
    for _ in range(3):
        optimizer.zero_grad()
        set_grads(params)
        optimizer.step()
    optimizer.zero_grad()
    optimizer.state_dict()
    expect_equal(manager.events, ["quorum", "commit"] * 3 + ["quorum"], "what the manager was asked")


@pytest.mark.clause("FT-004")
@pytest.mark.parametrize("arguments", [[], [True], [False]])
def test_zero_grad_resets(impl, arguments, dtype):
    """Gradients are None afterwards, by default too, and zero with set_to_none=False."""
    params = parameters(dtype=dtype)
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager(), make("SGD", [*params.values()]))
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
    """zero_grad(set_to_none=False) zeroes."""
    params = parameters()
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager(), make("SGD", [*params.values()]))
    set_grads(params)
    grad = params["p0"].grad
    optimizer.zero_grad(set_to_none=False)
    expect(params["p0"].grad is grad, "the same gradient tensor", params["p0"].grad)
    expect_bits(grad, torch.zeros(3), "gradient")


@pytest.mark.clause("FT-005")
def test_quorum_that_fails(impl):
    """The error of a quorum comes through, and the gradients are as they were."""
    params = parameters()
    optimizer = impl.FaultTolerantOptimizer(Refusing(), make("SGD", [*params.values()]))
    set_grads(params)
    before = [param.grad.clone() for param in params.values()]
    expect_raises(optimizer.zero_grad, RuntimeError, mentions=["no quorum"], expected="the manager's error")
    expect_unchanged(before, [param.grad for param in params.values()], "gradients")


# --- commit ---------------------------------------------------------------------------------------


@pytest.mark.clause("FT-006")
@pytest.mark.parametrize("kind", ["SGD", "Adam", "Adagrad"])
def test_committed_steps(impl, kind, dtype):
    """Committed steps leave parameters and state bit by bit as without the wrapper."""
    params, others = parameters(dtype=dtype), parameters(dtype=dtype)
    bare = make(kind, [*others.values()])
    inner = make(kind, [*params.values()])
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager([True] * 4), inner)
    for step in range(4):
        optimizer.zero_grad()
        for one, given in ((optimizer, params), (bare, others)):
            set_grads(given, seed=step)
            one.step()
    expect_unchanged(values(others), values(params), "parameters")
    expect_unchanged(contents(bare), contents(inner), "state")


@pytest.mark.clause("FT-006")
def test_sparse_and_missing_gradients(impl):
    """A sparse gradient and a missing one reach the wrapped optimizer as they are."""
    params = parameters(3, (4, 2))
    recorder = Recorder([*params.values()])
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager(), recorder)
    given = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 2), (4, 2), check_invariants=True)
    params["p0"].grad, params["p1"].grad = given, torch.ones(4, 2)
    optimizer.step()
    seen = recorder.received[0]
    expect(seen[0] is not None and seen[0].is_sparse, "a sparse gradient", seen[0])
    expect(not seen[0].is_coalesced(), "not coalesced by the wrapper", seen[0])
    expect_bits(seen[1], torch.ones(4, 2), "dense gradient")
    expect(seen[2] is None, "a missing gradient", seen[2])


@pytest.mark.clause("FT-006")
def test_dtensor_parameters(impl):
    """A step on a DTensor is that of the wrapped optimizer, and an uncommitted one leaves it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    with single_rank(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (1,))
        param, other = (torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh)) for _ in range(2))
        optimizer = impl.FaultTolerantOptimizer(ScriptedManager([True, False]), make("Adam", [param]))
        bare = make("Adam", [other])
        for one in (param, other):
            one.grad = distribute_tensor(torch.arange(4.0), mesh)
        optimizer.step()
        bare.step()
        optimizer.step()
        expect_bits(param.detach().to_local(), other.detach().to_local(), "parameter")
        moment, expected = (given.state[p]["exp_avg"] for given, p in ((optimizer, param), (bare, other)))
        expect_bits(moment.to_local(), expected.to_local(), "state")


# --- no commit ------------------------------------------------------------------------------------


@pytest.mark.clause("FT-007")
@pytest.mark.parametrize("kind", ["SGD", "Adam", "Adagrad"])
def test_uncommitted_step(impl, kind, dtype):
    """A step that is not committed leaves parameters, state and groups bit-identical."""
    params = parameters(dtype=dtype)
    inner = make(kind, [*params.values()])
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager([True, False, False]), inner)
    set_grads(params)
    optimizer.step()
    before, state = values(params), contents(inner)
    for _ in range(2):
        optimizer.step()
        expect_unchanged(before, values(params), "parameters")
        expect_unchanged(state, contents(inner), "state")


@pytest.mark.clause("FT-008")
@pytest.mark.parametrize("commits", [[False], [True]])
def test_gradients_are_kept(impl, commits):
    """A step, committed or not, leaves the very gradient tensors in place, unchanged."""
    params = parameters()
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager(commits), make("Adam", [*params.values()]))
    set_grads(params)
    grads = [param.grad for param in params.values()]
    before = snapshot(grads)
    optimizer.step()
    for grad, param in zip(grads, params.values(), strict=True):
        expect(param.grad is grad, "the same gradient tensor", param.grad)
    expect_unchanged(before, grads, "gradients")


@pytest.mark.clause("FT-009")
def test_uncommitted_first_step(impl):
    """Nothing is left behind by a first step that is not committed; the next one is the first."""
    params, others = parameters(), parameters()
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager([False, True]), make("Adam", [*params.values()]))
    bare = make("Adam", [*others.values()])
    set_grads(params)
    optimizer.step()
    expect_equal(len(optimizer.state), 0, "entries of the state")
    set_grads(params, seed=2)
    set_grads(others, seed=2)
    optimizer.step()
    bare.step()
    expect_unchanged(values(others), values(params), "parameters")
    expect_unchanged(contents(bare), contents(optimizer), "state")


@pytest.mark.clause("FT-010")
@pytest.mark.parametrize("kind", ["schedule", "window"])
@pytest.mark.parametrize("commits", [[True, False, True, True, False, False, True]])
def test_schedule_and_window_stand_still(impl, kind, commits):
    """Training with steps left out is training on the committed gradients alone."""
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
    expect_unchanged(contents(bare), contents(inner), "state, with schedule and window")
    expect_equal(getattr(inner, "iteration", 0), getattr(bare, "iteration", 0), "iteration")


@pytest.mark.clause("FT-010", "WARM-050")
@pytest.mark.parametrize("commits", [[True, False, True, True, False]])
def test_keyed_tree_inside(impl, commits):
    """Warmup around clipping around keyed Adam: what is not committed has not happened."""
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
    expect_unchanged(contents(bare), contents(optimizer), "state, by key")
    expect_equal(optimizer.param_groups[0]["lr"], bare.param_groups[0]["lr"], "rate of the schedule")


# --- asking ---------------------------------------------------------------------------------------


@pytest.mark.clause("FT-011")
@pytest.mark.parametrize("gradients", ["missing", "empty", "sparse", "dense"])
def test_asked_once_whatever_the_gradients(impl, gradients):
    """The manager is asked once a step, also when this rank has no gradient at all."""
    param = parameter(0 if gradients == "empty" else 3)
    manager = ScriptedManager()
    optimizer = impl.FaultTolerantOptimizer(manager, torch.optim.SGD([param], lr=0.1))
    if gradients != "missing":
        dense = torch.zeros_like(param)
        param.grad = dense.to_sparse() if gradients == "sparse" else dense
    optimizer.step()
    expect_equal(manager.events, ["commit"], "what the manager was asked")


@pytest.mark.clause("FT-012")
def test_healed_while_it_is_asked(impl):
    """The step starts from what the manager has loaded when it was asked."""
    params, others = parameters(), parameters()
    bare = make("Adam", [*others.values()])
    set_grads(others)
    bare.step()
    checkpoint, weights = contents(bare), values(others)

    def heal() -> None:
        optimizer.load_state_dict(snapshot_of_checkpoint)
        for param, value in zip(params.values(), weights, strict=True):
            param.data.copy_(value)

    snapshot_of_checkpoint = contents(bare)
    optimizer = impl.FaultTolerantOptimizer(Healing(heal), make("Adam", [*params.values()]))
    for given in (params, others):
        set_grads(given, seed=5)
    optimizer.step()
    bare.load_state_dict(checkpoint)
    bare.step()
    expect_unchanged(values(others), values(params), "parameters")
    expect_unchanged(contents(bare), contents(optimizer), "state")


@pytest.mark.clause("FT-013")
def test_manager_that_gives_up(impl):
    """An error of the manager comes through, and nothing has changed."""
    params = parameters()
    inner = make("SGD", [*params.values()])
    optimizer = impl.FaultTolerantOptimizer(Refusing(), inner)
    set_grads(params)
    before, state = values(params), contents(inner)
    expect_raises(
        optimizer.step, RuntimeError, mentions=["too many failures"], expected="the manager's error"
    )
    expect_unchanged(before, values(params), "parameters")
    expect_unchanged(state, contents(inner), "state")


@pytest.mark.clause("FT-014")
@pytest.mark.parametrize("commits", [[True], [False]])
def test_closure(impl, commits):
    """A closure is refused, or evaluated with gradients enabled before the manager is asked."""
    param = parameter(3)
    other = parameter(3)
    manager = ScriptedManager(commits)
    optimizer = impl.FaultTolerantOptimizer(manager, torch.optim.SGD([param], lr=0.1))

    def closure() -> torch.Tensor:
        manager.events.append("closure")
        optimizer.zero_grad()
        loss = (param * torch.arange(3.0)).sum()
        loss.backward()
        return loss

    before = values([param])
    try:
        optimizer.step(closure)
    except Exception:
        expect_unchanged(before, values([param]), "parameter after a refusal")
        expect_equal(manager.events, [], "what a refused closure led to")
        return
    expect_equal(manager.events, ["closure", "quorum", "commit"], "order of closure, quorum and commit")
    if commits == [True]:
        other.grad = torch.arange(3.0)
        torch.optim.SGD([other], lr=0.1).step()
    expect_unchanged(values([other]), values([param]), "parameter")


@pytest.mark.clause("FT-015")
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_nonfinite_gradients(impl, value):
    """Non-finite gradients are the manager's affair: they reach the optimizer as they are, or not at all."""
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
    """Optimizers combined into one and wrapped once are committed together, with one question a step."""
    params, others = parameters(), parameters()

    def both(given: Any) -> Both:
        return Both(make("SGD", [given["p0"]]), make("Adam", [given["p1"]]))

    manager = ScriptedManager(commits)
    optimizer, bare = impl.FaultTolerantOptimizer(manager, both(params)), both(others)
    for step, committed in enumerate(commits):
        optimizer.zero_grad()
        set_grads(params, seed=step)
        optimizer.step()
        if committed:
            set_grads(others, seed=step)
            bare.step()
    expect_equal(manager.events, ["quorum", "commit"] * 3, "what the manager was asked")
    expect_unchanged(values(others), values(params), "parameters")


@pytest.mark.clause("FT-017")
@pytest.mark.parametrize("how", ["torch", "fused", "combined", "added"])
def test_updates_in_the_backward(impl, how):
    """An optimizer whose parameters change in the backward is refused, or its updates are held back."""
    param, other = parameter(3), parameter(3, seed=1)

    class FusedOptimizer(torch.optim.SGD):
        """As torchrec's: step is a no-op, the update is done in the backward."""

        def step(self, closure: Any = None) -> Any:
            """Nothing is left to do."""

    if how in ("torch", "added"):
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 0.1})
        inner: Any = torch.optim.SGD([other if how == "added" else param], lr=0.1)
    else:
        inner = FusedOptimizer([param], lr=0.1)
        param.register_post_accumulate_grad_hook(lambda leaf: [leaf.data.sub_(leaf.grad)][1:] or None)
    if how == "combined":
        inner = Both(inner, torch.optim.SGD([other], lr=0.1))
        inner.optimizers = [("", optimizer) for optimizer in inner.both]
    before = values([param])
    try:
        optimizer = impl.FaultTolerantOptimizer(ScriptedManager([False]), inner)
        if how == "added":
            optimizer.add_param_group({"params": [param]})
    except Exception:
        return
    optimizer.zero_grad()
    param.sum().backward()
    optimizer.step()
    expect_unchanged(before, values([param]), "parameter after a step that was not committed")


@pytest.mark.clause("FT-018")
def test_what_step_returns(impl):
    """Recorded: what step returns when it is committed, and when it is not."""
    params = parameters()
    optimizer = impl.FaultTolerantOptimizer(ScriptedManager([True, False]), make("SGD", [*params.values()]))
    set_grads(params)
    return [outcome(optimizer.step), outcome(optimizer.step)]
