"""Combined optimizers: steps, closures, gradients, added groups."""

import contextlib
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
from keyedopt.conformance.suite.support.combined import combined_pair
from keyedopt.conformance.suite.support.device import ones, tensor
from keyedopt.conformance.suite.support.doubles import recording
from keyedopt.conformance.suite.support.inputs import parameter, set_grads, sgd, train


@pytest.mark.clause("COMB-023")
def test_a_step_is_a_step_of_each(impl, dtype):
    """Steps of the combination give the same parameters and state as separate steps of each optimizer."""
    combined, inner, params = combined_pair(impl, dtype)
    _, alone, others = combined_pair(impl, dtype)
    for seed in range(3):
        set_grads(params, seed=seed)
        set_grads(others, seed=seed)
        combined.step()
        for optimizer in alone:
            optimizer.step()
    for one, other, seen, wanted in zip(params, others, inner, alone, strict=True):
        expect_bits(one, other, "a parameter")
        expect_unchanged(snapshot(wanted.state[other]), seen.state[one], "its state")


@pytest.mark.clause("COMB-023")
def test_an_optimizer_without_gradients_steps_too(impl):
    """An optimizer without any gradient takes its step, so that its schedule advances."""
    made = [recording(impl, {"p": parameter(2)}) for _ in range(2)]
    combined = impl.CombinedOptimizer([(str(number), keyed) for number, (keyed, _) in enumerate(made)])
    combined.step()
    set_grads(made[1][0].params)
    combined.step()
    expect_equal([len(recorder.received) for _, recorder in made], [2, 2], "steps of each optimizer")


@pytest.mark.clause("COMB-024")
def test_a_closure_is_evaluated_once(impl):
    """A step evaluates the closure once, and every optimizer steps on these gradients."""
    params = [parameter(3, seed=seed) for seed in range(3)]
    inner = [(f"o{number}", sgd(impl, {"p": param}, lr=0.5)) for number, param in enumerate(params)]
    combined = impl.CombinedOptimizer(inner)
    before = snapshot(params)
    evaluated: list[int] = []

    def closure() -> torch.Tensor:
        evaluated.append(1)
        combined.zero_grad()
        loss = sum((param * param).sum() for param in params) ** 2
        loss.backward()
        return loss

    combined.step(closure)
    expect_equal(len(evaluated), 1, "evaluations of the closure")
    alone = [value.clone().requires_grad_() for value in before]
    (sum((param * param).sum() for param in alone) ** 2).backward()
    for number, (param, other) in enumerate(zip(params, alone, strict=True)):
        wanted = before[number].add(other.grad, alpha=-0.5)
        expect_bits(param, wanted, f"parameter {number}, stepped on the gradient of one evaluation")


@pytest.mark.clause("COMB-024")
def test_gradients_accumulate_once(impl):
    """A closure that accumulates gradients does so once per step, not once per optimizer."""
    params = [parameter(2, seed=seed) for seed in range(2)]
    keyed, recorders = zip(*(recording(impl, {"p": param}) for param in params), strict=True)
    combined = impl.CombinedOptimizer([("a", keyed[0]), ("b", keyed[1])])

    def closure() -> float:
        for param in params:
            ones = torch.ones_like(param)
            param.grad = ones if param.grad is None else param.grad + ones
        return 1.0

    combined.step(closure)
    for number, recorder in enumerate(recorders):
        expect_equal(len(recorder.received), 1, f"steps that optimizer {number} took")
        expect_bits(recorder.received[0][0], torch.ones(2), f"the gradient that optimizer {number} got")


@pytest.mark.clause("COMB-025")
@pytest.mark.parametrize("disabled", [False, True])
def test_a_closure_runs_with_gradients(impl, disabled):
    """A closure can call backward, also under no_grad and with any combined optimizers."""

    class Eager(torch.optim.SGD):
        def step(self, closure=None):
            loss = None if closure is None else closure()
            super().step()
            return loss

    param = parameter(2)
    keyed = impl.KeyedOptimizerWrapper({"p": param}, lambda listed: Eager(listed, lr=0.5))
    combined = impl.CombinedOptimizer([("a", keyed)])
    enabled: list[bool] = []

    def closure() -> torch.Tensor:
        enabled.append(torch.is_grad_enabled())
        loss = param.sum()
        if loss.requires_grad:
            loss.backward()
        return loss

    with torch.set_grad_enabled(not disabled):
        combined.step(closure)
    expect_equal(set(enabled), {True}, "whether gradients were enabled in the closure")


@pytest.mark.clause("COMB-026")
def test_what_a_step_returns(impl):
    """Observe what step returns with a closure and without."""
    combined, _, params = combined_pair(impl)
    set_grads(params)
    return {"with": outcome(lambda: combined.step(lambda: 2.5)), "without": outcome(combined.step)}


@pytest.mark.clause("COMB-027")
@pytest.mark.parametrize("without", [[0], [1], [0, 1]])
def test_parameters_without_a_gradient_are_left_alone(impl, without):
    """Only parameters with a gradient change, in every optimizer."""
    combined, _, params = combined_pair(impl, steps=1)
    before = snapshot(params)
    set_grads(params, seed=3)
    for number in without:
        params[number].grad = None
    combined.step()
    for number, param in enumerate(params):
        changed = not torch.equal(param, before[number])
        expect_equal(changed, number not in without, f"parameter {number} changed")


@pytest.mark.clause("COMB-027")
def test_sparse_and_dense_gradients_go_to_their_optimizers(impl):
    """Optimizers for sparse and for dense gradients work in one combination."""
    table, dense = parameter(4, 2, seed=1), parameter(3, seed=2)
    sparse = impl.KeyedOptimizerWrapper({"t": table}, lambda listed: torch.optim.SparseAdam(listed, lr=0.1))
    combined = impl.CombinedOptimizer([("s", sparse), ("d", sgd(impl, {"p": dense}, lr=0.5))])
    before = snapshot([table, dense])
    table.grad = torch.sparse_coo_tensor(
        tensor([[1, 1]]), tensor([[1.0, 2.0]] * 2), (4, 2), check_invariants=True
    )
    dense.grad = ones(3)
    combined.step()
    moved = (table.detach() != before[0]).any(dim=1).tolist()
    expect_equal(moved, [False, True, False, False], "rows of the table that moved")
    expect_bits(dense, before[1] - 0.5, "the dense parameter")


@pytest.mark.clause("COMB-028")
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_gradients_that_are_not_finite_stay_where_they_are(impl, value):
    """A non-finite gradient changes no parameter or state of another optimizer."""
    combined, inner, params = combined_pair(impl)
    _, alone, others = combined_pair(impl)
    for seed in range(2):
        set_grads(params, seed=seed)
        set_grads(others, seed=seed)
        params[0].grad[1] = float(value)
        combined.step()
        alone[1].step()
    expect_bits(params[1], others[1], "the parameter of the other optimizer")
    expect_unchanged(snapshot(alone[1].state[others[1]]), inner[1].state[params[1]], "its state")
    expect(not params[0].isfinite().all(), "a parameter that shows it", params[0].tolist())


@pytest.mark.clause("COMB-029")
@pytest.mark.parametrize("to_none", [None, False, True])
def test_zero_grad_reaches_all_optimizers(impl, dtype, to_none):
    """zero_grad sets all gradients to zero, and removes them with set_to_none=True."""
    combined, _, params = combined_pair(impl, dtype)
    set_grads(params)
    params[0].grad[0] = float("nan")
    combined.zero_grad(*([] if to_none is None else [to_none]))
    for param in params:
        if to_none:
            expect(param.grad is None, "no gradient", param.grad)
        else:
            expect(param.grad is not None, "a gradient of zeros", None)
            expect_bits(param.grad, torch.zeros_like(param), "the gradient")
    combined.zero_grad(set_to_none=True)
    combined.zero_grad()  # nothing to zero is no error


@pytest.mark.clause("COMB-053")
def test_what_step_returns(impl):
    """Observe what step returns with and without a closure."""
    combined, _, _ = combined_pair(impl)
    return [outcome(lambda: combined.step(lambda: 2.5)), outcome(combined.step)]


@pytest.mark.clause("COMB-032")
@pytest.mark.parametrize(
    "keys",
    [("a.q",), ("b.q",), ("q",), ("a.q", "b.r"), ("a.q", "r"), ("a.q", "a.r")],
    ids=" ".join,
)
def test_an_added_group_is_trained_or_refused(impl, keys):
    """An added group is trained and saved completely, or adding it raises and changes nothing."""
    combined, _, params = combined_pair(impl, steps=1)
    before = len(list(combined.param_groups)), set(combined.params)
    late = {key: parameter(2, seed=7 + number) for number, key in enumerate(keys)}
    values = [param.detach().clone() for param in late.values()]
    try:
        combined.add_param_group({"params": late, "lr": 0.5})
    except Exception:
        expect_equal((len(list(combined.param_groups)), set(combined.params)), before, "groups and keys")
        return
    expect_equal(set(combined.params), before[1] | set(keys), "keys of params")
    rates = [
        group["lr"] for group in combined.param_groups if any(late[keys[0]] is one for one in group["params"])
    ]
    expect_equal(rates, [0.5], "learning rate of the added group")
    train(combined, [*params, *late.values()], 1)
    for (key, param), value in zip(late.items(), values, strict=True):
        expect(not torch.equal(param, value), f"{key} trained", param.tolist())
    expect_equal(set(combined.state_dict()["state"]), before[1] | set(keys), "keys of the checkpoint")


@pytest.mark.clause("COMB-032")
@pytest.mark.parametrize("names", [("a", "ab"), ("ab", "a")], ids=" ".join)
def test_a_group_for_one_of_two_like_names(impl, names):
    """A prefix ends at its dot: whether a group is added does not depend on the beginning of another name."""
    expect_equal(
        added(impl, names), added(impl, ("c", "ab")), "keys after adding a group, beside those with c.p"
    )


def added(impl: Any, names: tuple[str, str]) -> Any:
    """Add a group for the optimizer ab; return the keys of its parameters, and how many others there are."""
    params = [parameter(2, seed=1), parameter(2, seed=2)]
    inner = dict(zip(names, (sgd(impl, {"p": param}, lr=0.5) for param in params), strict=True))
    combined = impl.CombinedOptimizer(list(inner.items()))
    with contextlib.suppress(Exception):
        combined.add_param_group({"params": {"ab.q": parameter(2, seed=7)}, "lr": 0.25})
    return set(inner["ab"].params), len(combined.params)


@pytest.mark.clause("COMB-032")
@pytest.mark.parametrize("how", ["no key", "known key", "known parameter", "no params", "no mapping"])
def test_a_group_that_does_not_fit_is_refused(impl, how):
    """A group without keys, or with a known key or parameter, raises and changes nothing."""
    combined, _, params = combined_pair(impl, steps=1)
    before = snapshot(combined.state_dict()["state"])
    late = parameter(2, seed=7)
    group: Any = {
        "no key": {"params": [late]},
        "known key": {"params": {"a.p": late}},
        "known parameter": {"params": {"a.q": params[1]}},
        "no params": {"lr": 0.5},
        "no mapping": [late],
    }[how]
    expect_raises(lambda: combined.add_param_group(group), Exception, expected="an error for the group")
    expect_equal(set(combined.params), {"a.p", "b.p"}, "keys of params")
    expect_equal(len(list(combined.param_groups)), 2, "number of groups")
    expect_unchanged(before, combined.state_dict()["state"], "the state")


@pytest.mark.clause("COMB-033")
def test_a_group_added_to_one_of_the_optimizers_is_seen(impl):
    """A group that is added to one of the optimizers appears at once."""
    combined, inner, params = combined_pair(impl, steps=1)
    late = parameter(2, seed=7)
    expect_equal(set(combined.params), {"a.p", "b.p"}, "keys of params before")
    try:
        inner[1].add_param_group({"params": {"q": late}, "lr": 0.5, "momentum": 0.5})
    except Exception:  # whether it can be added at all is the optimizer's own affair
        return
    expect_equal(set(combined.params), {"a.p", "b.p", "b.q"}, "keys of params")
    expect_equal(len(list(combined.param_groups)), 3, "number of groups")
    train(combined, [*params, late], 1)
    expect_equal(set(combined.state_dict()["state"]), {"a.p", "b.p", "b.q"}, "keys of the saved state")
