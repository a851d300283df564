"""Optimizers in the backward pass: copies, freed memory, the filter, checkpoints."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import expect, expect_bits, expect_equal, outcome
from keyedopt.conformance.suite.support.device import linear, ones
from keyedopt.conformance.suite.support.in_backward import apply_in_backward, optimizers_of
from keyedopt.conformance.suite.support.inputs import parameter, values


@pytest.mark.clause("INBW-028")
def test_copied_parameter(impl):
    """Observe whether a deep copy of a module is trained in its own backward pass."""
    layer = linear(3, 2)
    apply_in_backward(impl, torch.optim.SGD, layer.parameters())
    twin = copy.deepcopy(layer)
    twin(ones(1, 3)).sum().backward()
    return {
        "moved": bool((twin.bias != layer.bias).any()),
        "gradient": twin.bias.grad is not None,
        "optimizers": len(optimizers_of(twin.bias)),
    }


@pytest.mark.clause("INBW-029")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copy_leaves_the_original_alone(impl, how):
    """Training a copy of a module does not affect the original, which still trains."""
    layer = linear(3, 2)
    apply_in_backward(impl, torch.optim.SGD, layer.parameters())
    layer(ones(1, 3)).sum().backward()
    twin = copy.deepcopy(layer) if how == "deepcopy" else pickle.loads(pickle.dumps(layer))
    before = layer.bias.detach().clone()
    twin(ones(1, 3)).sum().backward()
    expect_bits(layer.bias.detach(), before, "the original after the copy was trained")
    layer(ones(1, 3)).sum().backward()
    expect_bits(layer.bias.detach(), before - 0.25, "the original after a step of its own")


@pytest.mark.clause("INBW-030")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copy_is_whole(impl, how):
    """A copy of a module trains and has optimizers, or keeps its gradients and has none."""
    layer = linear(3, 2)
    apply_in_backward(impl, torch.optim.SGD, layer.parameters())
    layer(ones(1, 3)).sum().backward()
    twin = copy.deepcopy(layer) if how == "deepcopy" else pickle.loads(pickle.dumps(layer))
    before = twin.bias.detach().clone()
    twin(ones(1, 3)).sum().backward()
    moved, kept = bool((twin.bias != before).any()), twin.bias.grad is not None
    says = bool(optimizers_of(twin.bias))
    expect(
        (moved, kept, says) in ((True, False, True), (False, True, False)),
        "all of it or nothing",
        (moved, kept, says),
    )


@pytest.mark.clause("INBW-031")
@pytest.mark.parametrize("used", [False, True])
def test_freed(impl, used):
    """A parameter without remaining references is freed, with its optimizer."""
    param: Any = parameter(4, 3)
    apply_in_backward(impl, torch.optim.Adam, [param])
    if used:
        param.sum().backward()
    optimizer, weak = weakref.ref(optimizers_of(param)[0]), weakref.ref(param)
    del param
    gc.collect()
    expect_equal(
        (weak() is None, optimizer() is None), (True, True), "whether parameter and optimizer are freed"
    )


@pytest.mark.clause("INBW-034")
@pytest.mark.needs("in_backward_optimizer_filter")
@pytest.mark.parametrize("include", [True, False, None])
def test_filter(impl, include):
    """The filter returns the parameters without an optimizer in the backward pass, or the others."""
    layer = linear(3, 2)
    apply_in_backward(impl, torch.optim.SGD, [layer.weight])
    options = {} if include is None else {"include": include}
    seen = list(impl.in_backward_optimizer_filter(layer.named_parameters(), **options))
    expect_equal([name for name, _ in seen], ["weight"] if include else ["bias"], "the names")
    expect(seen[0][1] is (layer.weight if include else layer.bias), "the parameter itself", seen[0][1])


@pytest.mark.clause("INBW-035")
@pytest.mark.needs("in_backward_optimizer_filter")
def test_filter_of_an_iterator(impl):
    """The filter preserves order, reads an iterator once, and partitions the parameters."""
    layers = torch.nn.Sequential(*(linear(2, 2) for _ in range(3)))
    apply_in_backward(impl, torch.optim.SGD, [layers[1].weight, layers[2].bias])
    layers[0].weight.requires_grad_(False)  # a frozen parameter is one without an optimizer
    names = [name for name, _ in layers.named_parameters()]
    halves = [
        [
            name
            for name, _ in impl.in_backward_optimizer_filter(iter(list(layers.named_parameters())), include)
        ]
        for include in (True, False)
    ]
    expect_equal(halves[0], ["1.weight", "2.bias"], "those with an optimizer")
    expect_equal(halves[1], [name for name in names if name not in halves[0]], "the others")


@pytest.mark.clause("INBW-050")
@pytest.mark.needs("in_backward_optimizer_filter")
def test_filter_after_a_copy(impl):
    """In a deep copy, the filter returns every parameter that the backward pass does not train."""
    layer = linear(3, 2)
    apply_in_backward(impl, torch.optim.SGD, [layer.weight])
    twin = copy.deepcopy(layer)
    before = values(twin.parameters())
    twin(ones(1, 3)).sum().backward()
    moved = {
        name
        for (name, param), old in zip(twin.named_parameters(), before, strict=True)
        if bool((param != old).any())
    }
    left = {name for name, _ in impl.in_backward_optimizer_filter(twin.named_parameters())}
    expect_equal(left, {"weight", "bias"} - moved, "the parameters for another optimizer")


@pytest.mark.clause("INBW-038")
def test_resume(impl):
    """The state of the optimizers can be saved and loaded, and training continues on the same trajectory."""
    param = parameter(4, 3)
    apply_in_backward(impl, torch.optim.Adam, [param])
    for factor in (1.0, 2.0):
        (param * factor).sum().backward()
    twin = param.detach().clone().requires_grad_()
    apply_in_backward(impl, torch.optim.Adam, [twin], {"lr": 0.5})
    optimizers_of(twin)[0].load_state_dict(copy.deepcopy(optimizers_of(param)[0].state_dict()))
    for factor in (3.0, 4.0):
        (param * factor).sum().backward()
        (twin * factor).sum().backward()
    expect_bits(twin.detach(), param.detach(), "the resumed parameter")


@pytest.mark.clause("INBW-042")
@pytest.mark.parametrize("form", ["list", "generator"])
def test_no_parameters(impl, form):
    """Observe what happens in a call without parameters, or with an exhausted generator."""
    empty: Any = [] if form == "list" else (one for one in ())
    return outcome(lambda: apply_in_backward(impl, torch.optim.SGD, empty))


@pytest.mark.clause("INBW-045")
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_rates_that_are_not_finite(impl, value):
    """Observe whether a non-finite learning rate raises an error."""
    return outcome(lambda: apply_in_backward(impl, torch.optim.SGD, [parameter(4, 3)], {"lr": float(value)}))
