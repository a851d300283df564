"""Wrappers: public attributes, steps, saving and loading, single and nested."""

from typing import Any
from unittest import mock

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
from keyedopt.conformance.suite.support.device import tensor
from keyedopt.conformance.suite.support.doubles import recording
from keyedopt.conformance.suite.support.inputs import adam, parameter, set_grads, train
from keyedopt.conformance.suite.support.wrapper import wrap_plainly, wrapped_adam


@pytest.mark.clause("WRAP-001")
def test_a_wrapper_is_a_keyed_optimizer(impl):
    """OptimizerWrapper, clipping and warmup are keyed optimizers."""
    wrapper, _, _ = wrapped_adam(impl)
    expect(isinstance(wrapper, impl.OptimizerWrapper), "an OptimizerWrapper", type(wrapper).__mro__)
    expect(isinstance(wrapper, torch.optim.Optimizer), "a torch optimizer", type(wrapper).__mro__)
    # All of them may be subclasses of another library's classes, so a common base is enough.
    for name, base in (
        ("OptimizerWrapper", impl.KeyedOptimizer),
        ("GradientClippingOptimizer", impl.OptimizerWrapper),
        ("WarmupOptimizer", impl.OptimizerWrapper),
    ):
        kind = getattr(impl, name, impl.OptimizerWrapper)
        common = set(kind.__mro__) & set(base.__mro__) - set(torch.optim.Optimizer.__mro__)
        expect(common, f"{name} a kind of {base.__name__}", kind.__mro__)


@pytest.mark.clause("WRAP-002")
@pytest.mark.parametrize("what", ["plain torch optimizer", "string", "none"])
def test_only_keyed_optimizers_are_wrapped(impl, what):
    """Wrapping an object that is not a keyed optimizer raises an error."""
    given: Any = None
    if what != "none":
        given = "ab" if what == "string" else torch.optim.SGD([parameter(2)], lr=0.1)
    expect_raises(lambda: impl.OptimizerWrapper(given), Exception, expected=f"an error for a {what}")


@pytest.mark.clause("WRAP-003")
@pytest.mark.parametrize("depth", [1, 3])
def test_a_wrapper_shows_what_it_wraps(impl, depth):
    """Params, state and param_groups are the same objects as in the wrapped optimizer."""
    wrapper, inner, params = wrapped_adam(impl, steps=1, depth=depth)
    expect_equal(list(wrapper.params), ["p", "q"], "keys of params")
    for key, param in zip(("p", "q"), params, strict=True):
        expect(wrapper.params[key] is param, f"the parameter {key} itself", wrapper.params)
        for name, value in inner.state[param].items():
            expect(wrapper.state[param][name] is value, f"the live {name} of {key}", wrapper.state)
    pairs = zip(wrapper.param_groups, inner.param_groups, strict=True)
    expect(all(one is other for one, other in pairs), "the same groups", wrapper.param_groups)


@pytest.mark.clause("WRAP-003")
@pytest.mark.parametrize("depth", [1, 3])
def test_an_entry_that_is_set_through_a_wrapper(impl, depth):
    """An entry that is set through a wrapper replaces the wrapped optimizer's; the next step uses it."""
    wrapper, inner, params = wrapped_adam(impl, steps=1, depth=depth)
    _, twin, twin_params = wrapped_adam(impl, steps=1)
    entry = {name: 2.0 * value for name, value in inner.state[params[1]].items()}
    twin.state[twin_params[1]].update(snapshot(entry))
    wrapper.state[params[1]] = entry
    expect(inner.state[params[1]]["exp_avg"] is entry["exp_avg"], "the entry that was set", inner.state)
    expect_equal(len(wrapper.state), 2, "entries of state")
    train(wrapper, params, 1, seed=5)
    train(twin, twin_params, 1, seed=5)
    expect_bits(params[1], twin_params[1], "the parameter after the next step")


@pytest.mark.clause("WRAP-004")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("combined", [False, True])
def test_state_that_appears_later_is_shown(impl, depth, combined):
    """State of the first step appears in a wrapper that was built before."""
    params = [parameter(3, seed=1), parameter(2, seed=2)]
    inner: Any = adam(impl, {"p": params[0], "q": params[1]})
    wrapper = wrap_plainly(impl, impl.CombinedOptimizer([("k", inner)]) if combined else inner, depth)
    expect_equal(len(wrapper.state), 0, "entries before the first step")
    train(wrapper, params, 1)
    expect_equal(len(wrapper.state), 2, "entries after the first step")
    for param in params:
        for name, value in inner.state[param].items():
            expect(wrapper.state[param][name] is value, f"the live {name}", wrapper.state[param])


@pytest.mark.clause("WRAP-006")
@pytest.mark.parametrize("depth", [1, 2])
def test_an_optimizer_whose_step_requires_its_argument_is_wrapped(impl, depth):
    """The wrapped step always receives its closure argument."""

    class Strict(impl.KeyedOptimizer):
        def step(self, closure):
            self.seen = closure

        def zero_grad(self, set_to_none):
            self.to_none = set_to_none

    param = parameter(2)
    inner = Strict({"p": param}, {}, [{"params": [param]}])
    wrapper = wrap_plainly(impl, inner, depth)
    wrapper.step()
    expect(inner.seen is None, "None for no closure", inner.seen)
    closure = int
    wrapper.step(closure)
    expect(inner.seen is closure, "the closure", inner.seen)
    wrapper.zero_grad()
    expect_equal(inner.to_none, False, "received set_to_none")


@pytest.mark.clause("WRAP-006")
def test_a_mock_of_the_interface_is_wrapped(impl):
    """A mock of a keyed optimizer can be wrapped and is called."""
    param = parameter(2)
    inner = mock.Mock(spec=impl.KeyedOptimizer)
    inner.params = {"p": param}
    inner.state = {}
    inner.param_groups = [{"params": [param], "lr": 0.1}]
    inner.defaults = {"_save_param_groups": False}
    inner.state_dict.return_value = {"state": {"p": {}}}
    wrapper = impl.OptimizerWrapper(inner)
    wrapper.step()
    wrapper.zero_grad(set_to_none=True)
    wrapper.save_param_groups(True)
    expect_equal(wrapper.state_dict()["state"], {"p": {}}, "what is saved")
    calls = [inner.step.call_count, inner.zero_grad.call_count, inner.save_param_groups.call_count]
    expect_equal(calls, [1, 1, 1], "calls of step, zero_grad, save_param_groups")


@pytest.mark.clause("WRAP-007")
@pytest.mark.parametrize("depth", [1, 3])
def test_a_step_is_a_step_of_the_wrapped_one(impl, dtype, depth):
    """Steps give the same parameters and state as without the wrapper."""
    _wrapper, inner, params = wrapped_adam(impl, dtype, steps=3, depth=depth)
    _, alone, others = wrapped_adam(impl, dtype)
    train(alone, others, 3)
    for one, other in zip(params, others, strict=True):
        expect_bits(one, other, "a parameter")
        expect_unchanged(snapshot(alone.state[other]), inner.state[one], "its state")


@pytest.mark.clause("WRAP-008")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("evaluations", [1, 3])
def test_a_closure_reaches_the_wrapped_optimizer(impl, depth, evaluations):
    """The wrapped optimizer evaluates the closure as often as it needs."""
    param = parameter(2)
    inner, recorder = recording(impl, {"p": param}, evaluations=evaluations)
    wrapper = wrap_plainly(impl, inner, depth)
    made: list[int] = []

    def closure() -> torch.Tensor:
        made.append(len(made) + 1)
        param.grad = None
        loss = param.sum() * len(made)
        loss.backward()
        return loss

    with torch.no_grad():
        wrapper.step(closure)
    expect_equal(made, list(range(1, evaluations + 1)), "evaluations of the closure")
    seen = [float(received[0][0]) for received in recorder.received]
    expect_equal(seen, [float(number) for number in made], "received gradients")


@pytest.mark.clause("WRAP-010")
def test_what_a_step_returns_and_the_text(impl):
    """Observe what step returns with a closure, and whether repr is the wrapped one's."""
    wrapper, inner, params = wrapped_adam(impl)
    set_grads(params)
    return {
        "with a closure": outcome(lambda: wrapper.step(lambda: 2.5)),
        "repr is the wrapped one's": repr(wrapper) == repr(inner),
    }


@pytest.mark.clause("WRAP-011")
@pytest.mark.parametrize("kind", ["dense", "missing", "empty", "sparse", "nan", "inf"])
def test_gradients_arrive_as_they_are(impl, kind):
    """The wrapped optimizer receives the same gradient object, unchanged, of any kind."""
    param = parameter(0 if kind == "empty" else 3, 2)
    inner, recorder = recording(impl, {"p": param})
    wrapper = wrap_plainly(impl, inner, 2)
    grad: Any = torch.ones_like(param)
    if kind in ("nan", "inf"):
        grad[0, 1] = float(kind)
    elif kind == "sparse":
        rows = tensor([[1.0, 2.0], [3.0, 4.0]])
        grad = torch.sparse_coo_tensor(tensor([[1, 1]]), rows, (3, 2), check_invariants=True)
    param.grad = None if kind == "missing" else grad
    before = snapshot(param.grad)
    wrapper.step()
    arrived = recorder.received[0][0]
    if kind == "missing":
        expect(arrived is None and param.grad is None, "no gradient", arrived)
        return
    expect(param.grad is grad, "the same gradient", param.grad)
    expect_bits(param.grad, before, "the gradient after the step")
    expect_bits(arrived, before, "the received gradient")


@pytest.mark.clause("WRAP-012")
@pytest.mark.parametrize("to_none", [None, False, True])
def test_zero_grad_is_passed_on(impl, dtype, to_none):
    """zero_grad sets gradients to zero, and removes them with set_to_none=True."""
    wrapper, _, params = wrapped_adam(impl, dtype, depth=2)
    set_grads(params)
    params[0].grad[0] = float("nan")
    wrapper.zero_grad(*([] if to_none is None else [to_none]))
    for param in params:
        if to_none:
            expect(param.grad is None, "no gradient", param.grad)
        else:
            expect(param.grad is not None, "a gradient of zeros", None)
            expect_bits(param.grad, torch.zeros_like(param), "the gradient")


@pytest.mark.clause("WRAP-012")
@pytest.mark.plain_only("its optimizer is of a class of its own")
def test_the_argument_of_zero_grad_is_passed_on(impl):
    """The wrapped zero_grad receives set_to_none, by default False."""

    class Noting(impl.KeyedOptimizerWrapper):
        notes: Any = ()

        def zero_grad(self, set_to_none=None):
            self.notes = (*self.notes, set_to_none)

    inner = Noting({"p": parameter(2)}, torch.optim.Adagrad)
    wrapper = wrap_plainly(impl, inner, 2)
    wrapper.zero_grad()
    wrapper.zero_grad(True)
    wrapper.zero_grad(set_to_none=True)
    expect_equal(inner.notes, (False, True, True), "received set_to_none")
