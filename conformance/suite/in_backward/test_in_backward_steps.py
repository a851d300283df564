"""Steps in the backward pass of optimizers that were applied to parameters."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import expect, expect_bits, expect_close, expect_equal
from keyedopt.conformance.suite.support.device import full, linear, ones, tensor, the_device, zeros
from keyedopt.conformance.suite.support.in_backward import (
    apply_in_backward,
    leaf_copies,
    optimizers_of,
    quadratic_loss,
    train_by_hand,
)
from keyedopt.conformance.suite.support.inputs import parameter

#: Optimizers of torch, with options that make their results differ.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.25, "momentum": 0.5, "weight_decay": 0.125},
    "Adagrad": {"lr": 0.25, "eps": 0.125},
    "Adam": {"lr": 0.25, "betas": [0.5, 0.75], "weight_decay": 0.125},
    "AdamW": {"lr": 0.25, "weight_decay": 0.5},
    "RMSprop": {"lr": 0.125, "alpha": 0.5},
}


def options_of(name: str) -> dict[str, Any]:
    """Return the options of one of the optimizers."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in OPTIMIZERS[name].items()}


@pytest.mark.clause("INBW-002")
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_steps(impl, name):
    """A backward pass updates each parameter like a step of its optimizer with its options."""
    kind, options = getattr(torch.optim, name), options_of(name)
    params = [parameter(4, 3), parameter(5, seed=1)]
    expected = leaf_copies(*params)
    train_by_hand(kind, expected, 3, **options)
    apply_in_backward(impl, kind, params, options)
    for step in range(3):
        quadratic_loss(*params, seed=1 + step).backward()
    for param, twin in zip(params, expected, strict=True):
        expect_bits(param.detach(), twin.detach(), "a parameter after three backward passes")


@pytest.mark.clause("INBW-002")
@pytest.mark.parametrize("factor", [0.0, "inf", "nan"])
def test_steps_with_unusual_gradients(impl, factor):
    """A gradient that is zero or not finite reaches the optimizer like any other."""
    param, options = parameter(4, 3), options_of("Adam")
    (twin,) = leaf_copies(param)
    apply_in_backward(impl, torch.optim.Adam, [param], options)
    by_hand = torch.optim.Adam([twin], **options)
    for scale in (1.0, float(factor)):
        (param.sum() * scale).backward()
        (twin.sum() * scale).backward()
        by_hand.step()
        twin.grad = None
    expect_bits(param.detach(), twin.detach(), "the parameter after two backward passes")


@pytest.mark.clause("INBW-003")
def test_gradients_are_none(impl):
    """After backward the gradients of the parameters are None."""
    params = [parameter(4, 3), parameter(5, seed=1)]
    apply_in_backward(impl, torch.optim.SGD, params, {"lr": 0.25})
    for _ in range(2):
        quadratic_loss(*params).backward()
        expect_equal([param.grad for param in params], [None, None], "the gradients after backward")


@pytest.mark.clause("INBW-004")
def test_other_parameters(impl):
    """Other parameters in the same graph are not updated, and keep their gradients."""
    param, other = parameter(4, 3), parameter(4, 3, seed=1)
    apply_in_backward(impl, torch.optim.SGD, [param], {"lr": 0.25})
    before = other.detach().clone()
    (param * other).sum().backward()
    expect_bits(other.detach(), before, "a parameter without an optimizer")
    expect(other.grad is not None, "its gradient is kept", other.grad)


@pytest.mark.clause("INBW-008")
@pytest.mark.parametrize(
    "kinds", [["SGD", "Adagrad"], ["SGD", "Adam"], ["Adagrad", "Adagrad"], ["Adam", "AdamW"]]
)
def test_several_optimizers(impl, kinds):
    """Several optimizers of one parameter step in order, on one gradient, each with its own state."""
    param = parameter(4, 3)
    (twin,) = leaf_copies(param)
    given = [(getattr(torch.optim, kind), options_of(kind)) for kind in kinds]
    for kind, options in given:
        apply_in_backward(impl, kind, [param], options)
    both = [kind([twin], **options) for kind, options in given]
    for step in range(3):
        quadratic_loss(param, seed=step).backward()
        quadratic_loss(twin, seed=step).backward()
        for optimizer in both:
            optimizer.step()
        twin.grad = None
    expect_bits(param.detach(), twin.detach(), "the parameter after three backward passes")


@pytest.mark.clause("INBW-009")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_one_step_each(impl, count):
    """Each optimizer of a parameter takes one step per backward pass, however many there are."""
    param = parameter(4, 3)
    for _ in range(count):
        apply_in_backward(impl, torch.optim.SGD, [param], {"lr": 0.25})
    calls = [0] * count
    for index, optimizer in enumerate(optimizers_of(param)):

        def count_one(*_: Any, index: int = index) -> None:
            calls[index] += 1

        optimizer.register_step_post_hook(count_one)
    quadratic_loss(param).backward()
    expect_equal(calls, [1] * count, "the steps of each optimizer in one backward pass")


@pytest.mark.clause("INBW-010")
@pytest.mark.parametrize("uses", [2, 5])
def test_used_several_times(impl, uses):
    """A parameter that a graph uses several times is updated once, with the sum of its gradients."""
    param = parameter(4, 3)
    (twin,) = leaf_copies(param)
    apply_in_backward(impl, torch.optim.Adam, [param], {"lr": 0.25})
    for _ in range(2):
        sum((quadratic_loss(param, seed=use) for use in range(uses)), zeros(())).backward()
    ordinary = torch.optim.Adam([twin], lr=0.25)
    for _ in range(2):
        sum((quadratic_loss(twin, seed=use) for use in range(uses)), zeros(())).backward()
        ordinary.step()
        ordinary.zero_grad()
    expect_bits(param.detach(), twin.detach(), "the parameter")


@pytest.mark.clause("INBW-010")
@pytest.mark.plain_only("its parameters are no list")
def test_shared_by_modules(impl):
    """A parameter that two modules share is updated once per backward pass."""
    first, second = linear(3, 3, bias=False), linear(3, 3, bias=False)
    second.weight = first.weight
    before = first.weight.detach().clone()
    apply_in_backward(impl, torch.optim.SGD, torch.nn.Sequential(first, second).parameters(), {"lr": 1.0})
    inputs = ones(1, 3)
    (gradient,) = torch.autograd.grad(second(first(inputs)).sum(), first.weight)
    second(first(inputs)).sum().backward()
    expect_bits(first.weight.detach(), before - gradient, "the weight")


@pytest.mark.clause("INBW-011")
@pytest.mark.parametrize("graph", ["another", "retained"])
def test_each_backward_is_a_step(impl, graph):
    """Each backward pass is a step, for micro-batches and for a repeated graph."""
    param = parameter(4, 3)
    apply_in_backward(impl, torch.optim.SGD, [param], {"lr": 0.25, "momentum": 0.5})
    before = param.detach().clone()
    factors = full((4, 3), 0.5)
    if graph == "another":
        for _ in range(2):
            (param * factors).sum().backward()
    else:
        value = (param * factors).sum()
        value.backward(retain_graph=True)
        value.backward()
    expect_close(
        param.detach(), before.double() - 0.25 * (0.5 + 0.75), "the parameter after two steps", ulps=64
    )


@pytest.mark.clause("INBW-012")
@pytest.mark.parametrize("how", ["autograd.grad", "backward of other inputs"])
def test_no_step_without_accumulation(impl, how):
    """autograd.grad, and backward for other tensors, update nothing and leave no gradient."""
    param, other = parameter(4, 3), parameter(4, 3, seed=1)
    apply_in_backward(impl, torch.optim.SGD, [param], {"lr": 0.25})
    before = param.detach().clone()
    value = (param * other).sum()
    if how == "autograd.grad":
        torch.autograd.grad(value, [param, other])
    else:
        value.backward(inputs=[other])
    expect_bits(param.detach(), before, "the parameter")
    expect_equal(param.grad, None, "its gradient")


@pytest.mark.clause("INBW-013")
def test_ordinary_optimizer_is_idle(impl):
    """An ordinary optimizer over the same parameter finds no gradient and has no effect."""
    param = parameter(4, 3)
    apply_in_backward(impl, torch.optim.SGD, [param], {"lr": 0.25})
    ordinary = torch.optim.Adam([param], lr=0.25, weight_decay=0.5)
    quadratic_loss(param).backward()
    before = param.detach().clone()
    ordinary.step()
    expect_bits(param.detach(), before, "the parameter after the ordinary step")


@pytest.mark.clause("INBW-021")
def test_rate_when_backward_runs(impl):
    """An update uses the learning rate that is set when the backward pass runs."""
    param = parameter(4, 3)
    apply_in_backward(impl, torch.optim.SGD, [param], {"lr": 0.25})
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers_of(param)[0], gamma=0.5)
    for rate in (0.25, 0.125, 0.0625):
        value = param.sum()
        before = param.detach().clone()
        value.backward()
        expect_bits(param.detach(), before - rate, f"the parameter after a step with learning rate {rate}")
        scheduler.step()


@pytest.mark.clause("INBW-022")
def test_grad_scaler(impl):
    """Observe how far a parameter moves, in units of the unscaled step, with a GradScaler of 8."""
    param = parameter(4, 3)
    apply_in_backward(impl, torch.optim.SGD, [param], {"lr": 1.0})
    scaler = torch.amp.GradScaler(the_device().type, init_scale=8.0)
    before = param.detach().clone()
    scaler.scale(param.sum()).backward()
    return round(float((before - param.detach()).mean()), 3)


@pytest.mark.clause("INBW-024")
def test_dtypes(impl, dtype):
    """A parameter of any dtype is updated like a step of its optimizer."""
    param = parameter(4, 3, dtype=dtype)
    (twin,) = leaf_copies(param)
    apply_in_backward(impl, torch.optim.Adagrad, [param], {"lr": 0.25})
    ordinary = torch.optim.Adagrad([twin], lr=0.25)
    for _ in range(2):
        (param * param).sum().backward()
        (twin * twin).sum().backward()
        ordinary.step()
        ordinary.zero_grad()
    expect_bits(param.detach(), twin.detach(), "the parameter")


@pytest.mark.clause("INBW-023")
@pytest.mark.parametrize("to", ["float64", "bfloat16"])
def test_moved_module(impl, to):
    """A module that is converted to another dtype after the call continues to train."""
    layer = linear(3, 2)
    apply_in_backward(impl, torch.optim.SGD, layer.parameters(), {"lr": 0.25})
    layer(ones(1, 3)).sum().backward()
    layer.to(getattr(torch, to))
    before = layer.bias.detach().clone()
    layer(ones(1, 3, dtype=getattr(torch, to))).sum().backward()
    expect_bits(layer.bias.detach(), before - 0.25, "the bias after another step")
    expect_equal(layer.bias.grad, None, "its gradient")


@pytest.mark.clause("INBW-025")
def test_sparse_gradients(impl):
    """A sparse gradient, coalesced or not, reaches the optimizer unchanged."""
    table = torch.nn.Embedding(5, 2, sparse=True, device=the_device())
    twin = torch.nn.Embedding(5, 2, sparse=True, device=the_device())
    twin.load_state_dict(table.state_dict())
    apply_in_backward(impl, torch.optim.SparseAdam, table.parameters(), {"lr": 0.25})
    ordinary = torch.optim.SparseAdam(twin.parameters(), lr=0.25)
    for rows in ([1, 3, 1], [0, 3]):
        table(tensor(rows)).square().sum().backward()
        twin(tensor(rows)).square().sum().backward()
        ordinary.step()
        ordinary.zero_grad()
    expect_bits(table.weight.detach(), twin.weight.detach(), "the table")


@pytest.mark.clause("INBW-026")
def test_without_gradient(impl):
    """A backward pass that does not involve a parameter neither updates it nor creates its state."""
    param, other = parameter(4, 3), parameter(4, 3, seed=1)
    apply_in_backward(impl, torch.optim.Adam, [param, other], {"lr": 0.25, "weight_decay": 0.5})
    before = other.detach().clone()
    quadratic_loss(param).backward()
    expect_bits(other.detach(), before, "the parameter that was not used")
    expect_equal(len(optimizers_of(other)[0].state), 0, "the number of its states")


@pytest.mark.clause("INBW-027")
@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_nonfinite(impl, bad):
    """A non-finite gradient does not affect other parameters."""
    param, other = parameter(4, 3), parameter(4, 3, seed=1)
    apply_in_backward(impl, torch.optim.SGD, [param, other], {"lr": 0.25})
    before = other.detach().clone()
    ((param * float(bad)).sum() + other.sum()).backward()
    expect_bits(other.detach(), before - 0.25, "the other parameter")
