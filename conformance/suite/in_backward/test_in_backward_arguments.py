"""apply_optimizer_in_backward: accepted arguments, errors, recorded attributes, and the filter."""

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_raises,
    outcome,
)
from keyedopt.conformance.suite.support.device import linear, ones, tensor, zeros
from keyedopt.conformance.suite.support.in_backward import apply_in_backward, optimizers_of
from keyedopt.conformance.suite.support.inputs import parameter, values


def expect_untouched(*params: Any) -> None:
    """Expect that no optimizer steps these parameters in a backward pass."""
    before = values(params)
    sum((param.sum() for param in params), zeros(())).backward()
    for param, old in zip(params, before, strict=True):
        expect_bits(param.detach(), old, "a parameter of a call that was refused, after a backward pass")
        expect(param.grad is not None, "its gradient is kept", param.grad)


def wrong_params(kind: str, param: Any) -> Any:
    """Make a params argument that is not an iterable of trainable parameters."""
    made: dict[str, Any] = {
        "bare parameter": torch.nn.Parameter(ones(())),
        "none": None,
        "text": "weight",
        "names and parameters": [("weight", param)],
        "groups": [{"params": [param]}],
        "optimizers": [torch.optim.SGD([param], lr=0.1)],
        "none among them": [param, None],
        "module": linear(2, 2),
    }
    return made[kind]


@pytest.mark.clause("INBW-001")
@pytest.mark.parametrize("by", ["position", "keyword"])
def test_call(impl, by):
    """The function takes optimizer_class, params and optimizer_kwargs, and returns None."""
    names = list(inspect.signature(impl.apply_optimizer_in_backward).parameters)[:3]
    expect_equal(names, ["optimizer_class", "params", "optimizer_kwargs"], "the arguments")
    param = parameter(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if by == "position":
            seen = impl.apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 0.25})
        else:
            seen = impl.apply_optimizer_in_backward(
                optimizer_kwargs={"lr": 0.25}, params=[param], optimizer_class=torch.optim.SGD
            )
    expect_equal(seen, None, "what is returned")
    before = param.detach().clone()
    param.sum().backward()
    expect_bits(param.detach(), before - 0.25, "the parameter")


@pytest.mark.clause("INBW-005")
def test_documented_example(impl):
    """The first parameter of a generator gets one optimizer, the remaining ones another."""
    model = torch.nn.Sequential(linear(3, 2), linear(2, 1))
    generator = model.parameters()
    first = next(generator)
    rest = list(generator)
    by_hand = copy.deepcopy(model)
    apply_in_backward(impl, torch.optim.SGD, [first], {"lr": 0.02})
    apply_in_backward(impl, torch.optim.Adam, rest, {"lr": 0.04})
    before = values(rest)
    for one in (model, by_hand):
        one(ones(1, 3)).sum().backward()
    torch.optim.SGD([next(by_hand.parameters())], lr=0.02).step()
    expect_close(first.detach(), next(by_hand.parameters()).detach().double(), "the first, stepped by SGD")
    moved = [float((old - new.detach()).abs().max()) for old, new in zip(before, rest, strict=True)]
    expect(all(abs(step - 0.04) < 1e-5 for step in moved), "first steps of Adam, of 0.04", moved)


@pytest.mark.clause("INBW-006")
@pytest.mark.parametrize("form", ["list", "tuple", "generator", "module"])
def test_iterables(impl, form):
    """The argument params may be any iterable, also one that can be read only once."""
    layer = linear(3, 2)
    listed = list(layer.parameters())
    params = {
        "list": listed,
        "tuple": tuple(listed),
        "generator": (x for x in listed),
        "module": layer.parameters(),
    }
    apply_in_backward(impl, torch.optim.SGD, params[form])
    before = values(listed)
    sum((one.sum() for one in listed), zeros(())).backward()
    for param, old in zip(listed, before, strict=True):
        expect_bits(param.detach(), old - 0.25, "a parameter")


@pytest.mark.clause("INBW-007")
def test_attributes(impl):
    """Lists on the parameter contain its optimizers, their classes and their arguments."""
    other, param = parameter(4, 3, seed=1), parameter(4, 3)
    apply_in_backward(impl, torch.optim.SGD, [other, param], {"lr": 0.25})
    apply_in_backward(impl, torch.optim.Adagrad, [param], {"lr": 0.5, "eps": 0.125})
    expect_equal(len(optimizers_of(other)), 1, "the number of the other parameter's optimizers")
    expect_equal(
        [type(x) for x in optimizers_of(param)], [torch.optim.SGD, torch.optim.Adagrad], "the optimizers"
    )
    held = [x.param_groups[0]["params"] for x in optimizers_of(param)]
    expect(all(len(x) == 1 and x[0] is param for x in held), "the parameter in each", held)
    classes = list(param._optimizer_classes)
    expect_equal(classes, [torch.optim.SGD, torch.optim.Adagrad], "_optimizer_classes")
    expected = [{"lr": 0.25}, {"lr": 0.5, "eps": 0.125}]
    expect_equal([dict(x) for x in param._optimizer_kwargs], expected, "_optimizer_kwargs")


@pytest.mark.clause("INBW-014")
@pytest.mark.parametrize("kind", ["frozen", "computed"])
def test_parameters_that_no_backward_steps(impl, kind):
    """A frozen parameter or a computed tensor raises an error that names params."""
    wrong = parameter(4, 3)
    wrong = wrong.requires_grad_(False) if kind == "frozen" else wrong * 2
    expect_raises(
        lambda: apply_in_backward(impl, torch.optim.SGD, [wrong]),
        ValueError,
        TypeError,
        mentions=["params"],
        expected=f"an error for a {kind} tensor",
    )


@pytest.mark.clause("INBW-015")
@pytest.mark.parametrize(
    "kind",
    [
        "bare parameter",
        "none",
        "text",
        "names and parameters",
        "groups",
        "optimizers",
        "none among them",
        "module",
    ],
)
def test_wrong_params(impl, kind):
    """A params argument that is not an iterable of parameters raises an error that names params."""
    wrong = wrong_params(kind, parameter(4, 3))
    expect_raises(
        lambda: apply_in_backward(impl, torch.optim.SGD, wrong),
        TypeError,
        ValueError,
        mentions=["params"],
        expected=f"an error for {kind}",
    )


@pytest.mark.clause("INBW-048")
@pytest.mark.parametrize("kind", ["none", "module class", "instance", "text", "function"])
def test_wrong_class(impl, kind):
    """An invalid optimizer_class raises an error that names optimizer_class."""
    made: dict[str, Any] = {
        "none": None,
        "module class": torch.nn.Linear,
        "instance": torch.optim.SGD([parameter(4, 3)], lr=0.1),
        "text": "SGD",
        "function": len,
    }
    expect_raises(
        lambda: apply_in_backward(impl, made[kind], [parameter(4, 3)], {}),
        TypeError,
        ValueError,
        mentions=["optimizer_class"],
        expected=f"an error for {kind}",
    )


@pytest.mark.clause("INBW-049")
@pytest.mark.parametrize("kwargs", [None, [["lr", 0.1]], "lr", 0.1])
def test_wrong_kwargs(impl, kwargs):
    """An optimizer_kwargs that is not a mapping raises an error that names optimizer_kwargs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expect_raises(
            lambda: impl.apply_optimizer_in_backward(torch.optim.SGD, [parameter(4, 3)], kwargs),
            TypeError,
            ValueError,
            mentions=["optimizer_kwargs"],
            expected=f"an error for {kwargs!r}",
        )


@pytest.mark.clause("INBW-017")
@pytest.mark.parametrize(
    "kwargs", [{"lr": -0.1}, {"momentum": -1.0}, {"rate": 0.1}, {"lr": 0.1, "params": []}]
)
def test_kwargs_that_the_optimizer_refuses(impl, kwargs):
    """Arguments that the optimizer rejects, or out of range, raise an exception."""
    param = parameter(4, 3)
    expect_raises(
        lambda: apply_in_backward(impl, torch.optim.SGD, [param], kwargs),
        Exception,
        expected=f"an error for {kwargs}",
    )
    expect_untouched(param)


@pytest.mark.clause("INBW-016")
@pytest.mark.parametrize("last", ["frozen", "none", "name and parameter"])
def test_all_or_nothing(impl, last):
    """A call that raises because of one parameter has no effect on the others."""
    first, second = parameter(4, 3), parameter(4, 3, seed=1)
    wrong: Any = {
        "frozen": parameter(4, 3).requires_grad_(False),
        "none": None,
        "name and parameter": ("p", parameter(4, 3)),
    }[last]
    expect_raises(
        lambda: apply_in_backward(impl, torch.optim.SGD, [first, second, wrong]),
        Exception,
        expected=f"an error for {last}",
    )
    expect_untouched(first, second)


class OfMatrices(torch.optim.SGD):
    """An optimizer that refuses parameters that are no matrices."""

    def __init__(self, params: Any, lr: float) -> None:
        listed = list(params)
        if any(param.dim() != 2 for param in listed):
            raise ValueError("only matrices can be optimized")
        super().__init__(listed, lr=lr)


@pytest.mark.clause("INBW-016")
def test_a_parameter_that_the_optimizer_refuses(impl):
    """A call in which the optimizer refuses the last parameter has no effect on the others."""
    matrices, vector = [parameter(4, 3), parameter(4, 3, seed=1)], parameter(3)
    expect_raises(
        lambda: apply_in_backward(impl, OfMatrices, [*matrices, vector]),
        Exception,
        expected="the error of the optimizer",
    )
    expect_untouched(*matrices, vector)


@pytest.mark.clause("INBW-018")
@pytest.mark.parametrize("form", ["list", "generator"])
def test_listed_twice(impl, form):
    """A parameter that is listed twice in one call raises an error, or is updated once per backward pass."""
    param = parameter(4, 3)
    before = param.detach().clone()
    listed = [param, param]
    try:
        apply_in_backward(impl, torch.optim.SGD, listed if form == "list" else (one for one in listed))
    except ValueError:
        expect_untouched(param)
        return
    param.sum().backward()
    expect_bits(param.detach(), before - 0.25, "a parameter listed twice, after a backward pass,")


@pytest.mark.clause("INBW-019")
@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_applied_twice(impl, kind):
    """Observe how many optimizers a parameter has after a second call."""
    param = parameter(4, 3)
    apply_in_backward(impl, torch.optim.SGD, [param])
    return outcome(
        lambda: apply_in_backward(impl, getattr(torch.optim, kind), [param]) or len(optimizers_of(param))
    )


@pytest.mark.clause("INBW-020")
def test_kwargs_are_not_shared(impl):
    """The recorded arguments belong to one parameter and are separate from the given dictionary."""
    first, second = parameter(4, 3), parameter(4, 3, seed=1)
    given = {"lr": 0.25}
    apply_in_backward(impl, torch.optim.SGD, [first, second], given)
    first._optimizer_kwargs[0]["lr"] = 0.5
    expect_equal(second._optimizer_kwargs[0]["lr"], 0.25, "the other parameter's")
    expect_equal(given, {"lr": 0.25}, "those that were given")
    given["lr"] = 0.75
    expect_equal(second._optimizer_kwargs[0]["lr"], 0.25, "the other parameter's")


@pytest.mark.clause("INBW-020")
def test_rate_tensor_is_not_shared(impl):
    """Schedulers of two parameters do not share a learning rate that was given as one tensor."""
    params = [parameter(4, 3), parameter(4, 3, seed=1)]
    apply_in_backward(impl, torch.optim.SGD, params, {"lr": tensor(0.25)})
    listed = [optimizers_of(param)[0] for param in params]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, gamma=0.5) for one in listed]
    for param in params:
        param.sum().backward()
    for scheduler in schedulers:
        scheduler.step()
    rates = [float(one.param_groups[0]["lr"]) for one in listed]
    expect_equal(rates, [0.125, 0.125], "the learning rates after one step of each scheduler")
