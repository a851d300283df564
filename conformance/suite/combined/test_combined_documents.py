"""Combinations: sentences of the documents about names, gradients and loading."""

import copy
import functools
import inspect
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_raises,
    snapshot,
)
from keyedopt.conformance.suite.support.combined import combined_pair
from keyedopt.conformance.suite.support.device import full, zeros
from keyedopt.conformance.suite.support.inputs import parameter, set_grads, set_wide_grads, sgd


@pytest.mark.clause("COMB-046")
def test_names_of_arguments(impl):
    """Every argument can be given by its documented name; prepend_opt_key is static and returns a string."""
    param = parameter(3)
    combined = impl.CombinedOptimizer(optims=[("a", sgd(impl, {"p": param}, momentum=0.5))])
    set_grads([param])
    combined.step(closure=None)
    combined.save_param_groups(save=True)
    saved = copy.deepcopy(combined.state_dict())
    expect("param_groups" in saved, "the groups in the state_dict", sorted(saved))
    combined.load_state_dict(state_dict=saved)
    combined.zero_grad(set_to_none=True)
    expect_equal(param.grad, None, "the gradient")
    static = inspect.getattr_static(impl.CombinedOptimizer, "prepend_opt_key")
    expect(isinstance(static, staticmethod), "a static method", type(static))
    joined = impl.CombinedOptimizer.prepend_opt_key(opt_key="a", name="p")
    expect(isinstance(joined, str) and joined.startswith("a") and joined.endswith("p"), "a key", joined)
    expect_equal(list(combined.params), [joined], "keys of the combination")


@pytest.mark.clause("COMB-047")
def test_a_step_does_not_modify_gradients(impl):
    """After a step each .grad is the same tensor with the same values."""
    combined, _, params = combined_pair(impl, steps=1)
    set_wide_grads(params)
    given = [param.grad for param in params]
    before = [grad.clone() for grad in given]
    combined.step()
    for param, grad, old in zip(params, given, before, strict=True):
        expect(param.grad is grad, "the same tensor as gradient", param.grad)
        expect_bits(grad, old, "the gradient after a step")


@pytest.mark.plain_only("it counts groups")
@pytest.mark.clause("COMB-048")
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("fault", ["parameter", "entry", "more", "shape"])
def test_incompatible_state_is_an_error(impl, place, fault):
    """State that does not fit the first or the last optimizer raises an error."""
    combined, _, _ = combined_pair(impl, steps=1)
    saved = copy.deepcopy(combined.state_dict())
    key = list(saved["state"])[place]
    if fault == "parameter":
        del saved["state"][key]
    elif fault == "entry":
        saved["state"][key].popitem()
    elif fault == "more":
        saved["state"][key]["more"] = zeros(3)
    else:
        name = next(name for name, value in saved["state"][key].items() if value.numel() > 1)
        saved["state"][key][name] = zeros(7, 5)
    expect_raises(lambda: combined.load_state_dict(saved), Exception, expected=f"an error ({fault} of {key})")


@pytest.mark.clause("COMB-049")
def test_post_load_state_dict(impl):
    """A load calls post_load_state_dict of each combined optimizer when its state is loaded."""
    seen: dict[float, float] = {}

    class Noting(impl.KeyedOptimizer):
        def post_load_state_dict(self) -> None:
            (entry,) = self.state_dict()["state"].values()
            seen[float(entry["number"][0])] = float(entry["m"][0])

    listed = []
    for number in (1.0, 2.0):
        param = parameter(3)
        state = {"m": zeros(3), "number": full((3,), number)}
        listed.append((f"k{number:.0f}", Noting({"p": param}, {param: state}, [])))
    combined = impl.CombinedOptimizer(listed)
    saved = copy.deepcopy(combined.state_dict())
    for entry in saved["state"].values():
        entry["m"].fill_(4.0)
    combined.load_state_dict(saved)
    expect_equal(seen, {1.0: 4.0, 2.0: 4.0}, "the state that each post_load_state_dict saw")


@pytest.mark.clause("COMB-050")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_optimizer_that_evaluates_the_closure_several_times(impl, place):
    """LBFGS steps as by itself, and the others step on the gradients of the first evaluation."""
    for in_place in (False, True):
        expect_first_gradients(impl, place, in_place)


def expect_first_gradients(impl: Any, place: int, in_place: bool) -> None:
    """Check a combination with LBFGS, whose closure makes new gradients or writes into the old ones."""
    params, others = ([parameter(3, dtype="float64", seed=seed) for seed in range(3)] for _ in range(2))

    def make(number: int, listed: list[Any]) -> Any:
        if number == place:
            return torch.optim.LBFGS(listed, lr=0.25, max_iter=3, tolerance_change=0.0)
        return torch.optim.SGD(listed, lr=0.5, momentum=0.5)

    def closure(listed: list[Any]) -> Any:
        for param in listed:
            if in_place and param.grad is not None:
                param.grad.zero_()
            else:
                param.grad = None
        fixed = listed[place].detach()
        loss = sum(
            ((param - 1) if param is listed[place] else param * fixed).square().sum() for param in listed
        )
        loss.backward()
        return loss

    combined = impl.CombinedOptimizer(
        [
            (f"k{number}", impl.KeyedOptimizerWrapper({"p": param}, functools.partial(make, number)))
            for number, param in enumerate(params)
        ]
    )
    plain = [make(number, [param]) for number, param in enumerate(others)]
    for _ in range(2):
        combined.step(lambda: closure(params))
        closure(others)
        grads = snapshot([param.grad for param in others])
        plain[place].step(lambda: closure(others))
        for param, grad, optimizer in zip(others, grads, plain, strict=True):
            if optimizer is not plain[place]:
                param.grad = grad
                optimizer.step()
    for param, other in zip(params, others, strict=True):
        expect_close(param.detach(), other.detach(), "a parameter after two steps", ulps=64)


@pytest.mark.clause("COMB-051")
@pytest.mark.parametrize("nested", [False, True])
def test_a_step_without_the_closure_that_a_member_needs(impl, nested):
    """Without a closure a combination with LBFGS raises an error before any optimizer has stepped."""
    params = [parameter(3, seed=seed) for seed in range(2)]
    first = impl.KeyedOptimizerWrapper({"p": params[0]}, functools.partial(torch.optim.SGD, lr=0.5))
    second = impl.KeyedOptimizerWrapper({"p": params[1]}, torch.optim.LBFGS)
    if nested:
        second = impl.OptimizerWrapper(impl.CombinedOptimizer([("b", second)]))
    combined = impl.CombinedOptimizer([("a", first), ("b", second)])
    for param in params:
        param.grad = torch.ones_like(param)
    before = [param.detach().clone() for param in params]
    expect_raises(combined.step, Exception, expected="an error: LBFGS needs a closure")
    for param, old in zip(params, before, strict=True):
        expect_bits(param.detach(), old, "a parameter after the error")
