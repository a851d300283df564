"""Optimizers in the backward pass: create_graph, hooks, errors, DTensor, autocast and compiling."""

import warnings
import weakref

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_raises,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.device import linear, ones, the_device
from keyedopt.conformance.suite.support.doubles import single_rank
from keyedopt.conformance.suite.support.in_backward import (
    COMPILED,
    apply_in_backward,
    leaf_copies,
    optimizers_of,
    quadratic_loss,
    train_by_hand,
)
from keyedopt.conformance.suite.support.inputs import parameter

#: Optimizers of the implementation.
OWN_OPTIMIZERS = (
    "SGD", "Adagrad", "RowWiseAdagrad", "Adam", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB", "LarsSGD",
    "Ftrl",
)  # fmt: skip


@pytest.mark.clause("INBW-036")
def test_create_graph(impl):
    """A backward pass with create_graph updates like any other."""
    param = parameter(4, 3)
    (twin,) = leaf_copies(param)
    apply_in_backward(impl, torch.optim.SGD, [param], {"lr": 0.25})
    train_by_hand(torch.optim.SGD, [twin], lr=0.25)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quadratic_loss(param).backward(create_graph=True)
    expect_bits(param.detach(), twin.detach(), "the parameter")
    expect(param.is_leaf and param.grad is None, "a leaf without a gradient", (param.is_leaf, param.grad))


@pytest.mark.clause("INBW-037")
def test_hooks(impl):
    """Step hooks of the optimizers run, and gradient hooks of the parameter run before the step."""
    param = parameter(4, 3)
    apply_in_backward(impl, torch.optim.SGD, [param], {"lr": 0.25})
    events: list[str] = []
    (optimizer,) = optimizers_of(param)
    optimizer.register_step_pre_hook(lambda *_: events.append("pre"))
    optimizer.register_step_post_hook(lambda *_: events.append("post"))
    param.register_hook(lambda grad: grad * 2)
    before = param.detach().clone()
    param.sum().backward()
    expect_equal(events, ["pre", "post"], "the hooks")
    expect_bits(param.detach(), before - 0.5, "the parameter, whose gradient a hook doubles")


@pytest.mark.clause("INBW-039")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", OWN_OPTIMIZERS)
def test_algorithms(impl, algorithm):
    """Every optimizer of the implementation steps in the backward pass as it does outside."""
    kind = getattr(impl, algorithm)
    param = parameter(4, 3)
    (twin,) = leaf_copies(param)
    apply_in_backward(impl, kind, [param], {"lr": 0.25})
    for step in range(3):
        quadratic_loss(param, seed=1 + step).backward()
    train_by_hand(kind, [twin], 3, lr=0.25)
    expect_bits(param.detach(), twin.detach(), f"the parameter after three steps of {algorithm}")


@pytest.mark.clause("INBW-040")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", ["AccumulateSGD", "AccumulateAdagrad", "AccumulateAdam"])
def test_accumulating(impl, algorithm):
    """An accumulating optimizer updates once per window of backward passes, with the summed gradient."""
    param = parameter(4, 3)
    plain = getattr(torch.optim, algorithm.removeprefix("Accumulate"))
    (twin,) = leaf_copies(param)
    apply_in_backward(
        impl, getattr(impl, algorithm), [param], {"lr": 0.25, "use_accumulate": True, "accumulate_step": 3}
    )
    ordinary = plain([twin], lr=0.25)
    for _ in range(2):
        before = param.detach().clone()
        for seed in range(3):
            expect_bits(param.detach(), before, "the parameter within a window")
            quadratic_loss(param, seed=seed).backward()
            quadratic_loss(twin, seed=seed).backward()
        ordinary.step()
        ordinary.zero_grad()
        expect_close(param.detach(), twin.detach(), "the parameter after a window", ulps=64)


@pytest.mark.clause("INBW-041")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_segments(impl, reentrant):
    """Observe how many steps a parameter takes if two checkpointed segments of a graph use it."""
    from torch.utils.checkpoint import checkpoint

    param = parameter(3)
    apply_in_backward(impl, torch.optim.SGD, [param], {"lr": 0.25})
    calls: list[int] = []
    optimizers_of(param)[0].register_step_post_hook(lambda *_: calls.append(1))
    inputs = ones(3, requires_grad=True)
    middle = checkpoint(lambda x: x * param, inputs, use_reentrant=reentrant)
    checkpoint(lambda x: x * param, middle, use_reentrant=reentrant).sum().backward()
    return len(calls)


@pytest.mark.clause("INBW-043")
def test_error_in_a_step(impl):
    """A backward pass raises an error of the optimizer, and the parameter does not change."""
    param = parameter(4, 3)
    apply_in_backward(
        impl, torch.optim.SparseAdam, [param], {"lr": 0.25}
    )  # SparseAdam raises for dense gradients
    before = param.detach().clone()
    expect_raises(lambda: quadratic_loss(param).backward(), RuntimeError, expected="the optimizer's error")
    expect_bits(param.detach(), before, "the parameter")


@pytest.mark.clause("INBW-044")
def test_gradient_from_before(impl):
    """Observe whether a gradient of 1 from before backward is added to the gradient of 2."""
    param = parameter(4, 3)
    apply_in_backward(impl, torch.optim.SGD, [param], {"lr": 1.0})
    before = param.detach().clone()
    param.grad = ones(4, 3)
    (param * 2).sum().backward()
    return round(float((before - param.detach()).mean()), 3) - 2


@pytest.mark.clause("INBW-046")
def test_dtensor(impl):
    """A DTensor is updated like the full tensor that it represents."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    plain = parameter(4, 3)
    before = plain.detach().clone()
    with single_rank():
        mesh = init_device_mesh(the_device().type, (1,))
        param = torch.nn.Parameter(distribute_tensor(before, mesh, [Shard(0)]))
        apply_in_backward(impl, torch.optim.SGD, [param], {"lr": 0.25})
        param.sum().backward()
        expect_bits(param.detach().full_tensor(), before - 0.25, "the whole tensor")
        expect_equal(param.grad, None, "its gradient")


@pytest.mark.clause("INBW-002")
def test_with_process_group(impl):
    """Where torch.distributed is set up, a backward pass steps as elsewhere."""
    param = parameter(4, 3)
    (twin,) = leaf_copies(param)
    gone = weakref.proxy(linear(1, 1))  # raises an error whenever it is used
    with single_rank():
        apply_in_backward(impl, torch.optim.SGD, [param], {"lr": 0.25})
        param.sum().backward()
    expect_bits(param.detach(), twin.detach() - 0.25, "the parameter")
    del gone


@pytest.mark.clause("INBW-047")
@pytest.mark.parametrize("dtype_of_autocast", ["bfloat16"])
def test_autocast(impl, dtype_of_autocast):
    """Under autocast a parameter is updated as without autocast."""
    layer = linear(3, 2)
    twin = linear(3, 2)
    twin.load_state_dict(layer.state_dict())
    apply_in_backward(impl, torch.optim.SGD, layer.parameters(), {"lr": 0.25})
    ordinary = torch.optim.SGD(twin.parameters(), lr=0.25)
    for one in (layer, twin):
        with torch.autocast(the_device().type, dtype=getattr(torch, dtype_of_autocast)):
            value = one(ones(2, 3)).sum()
        value.backward()
    ordinary.step()
    expect_unchanged(
        snapshot(dict(twin.named_parameters())), dict(layer.named_parameters()), "the parameters"
    )


@pytest.mark.clause("INBW-051")
@pytest.mark.parametrize("what", COMPILED)
def test_compiled(impl, what):
    """A compiled model, and a compiled step with its backward pass, train as without compiling."""
    param = parameter(4, 3)
    (twin,) = leaf_copies(param)
    for one in (param, twin):
        apply_in_backward(impl, torch.optim.SGD, [one], {"lr": 0.25, "momentum": 0.5})

    def loss(weight):
        return (weight * weight).sum()

    def step(weight):
        loss(weight).backward()

    compiled = torch.compile(loss if what == "model" else step, backend="eager")
    for _ in range(2):
        value = compiled(param)
        if what == "model":
            value.backward()
        step(twin)
    expect_bits(param.detach(), twin.detach(), "the parameter")
    expect_equal(param.grad, None, "its gradient")
