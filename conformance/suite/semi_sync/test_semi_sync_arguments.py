"""Semi-synchronous training: constructor arguments, errors, and methods that are passed on."""

import math
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_raises,
    expect_unchanged,
)
from keyedopt.conformance.suite.support.device import ones, the_device
from keyedopt.conformance.suite.support.inputs import adam, parameter, parameters, sgd, train, values
from keyedopt.conformance.suite.support.replicas import GLOBAL_COUNTER, LOCAL_COUNTER, Outer, semisync


class Told(torch.optim.SGD):
    """An optimizer that records the calls of its further methods."""

    told: Any = None

    def set_optimizer_step(self, step: int) -> None:
        """Record a step count."""
        self.told = [*(self.told or []), step]

    def update_hyper_parameters(self, params_dict: Any) -> None:
        """Record hyper-parameters."""
        self.told = [*(self.told or []), params_dict]

    def global_step(self, count: Any, closure: Any = None) -> None:
        """Do nothing."""


@pytest.mark.clause("SEMI-001")
@pytest.mark.parametrize("how", ["list", "generator", "groups", "groups of one"])
def test_it_is_a_keyed_optimizer(impl, how):
    """It takes parameters or groups and two keyed optimizers; 16 local steps per global step."""
    params = parameters()
    given: Any = {
        "list": [*params.values()],
        "generator": (param for param in params.values()),
        "groups": [{"params": [*params.values()][:1]}, {"params": [*params.values()][1:]}],
        "groups of one": [{"params": param} for param in params.values()],
    }[how]
    made: list[Outer] = []

    def factory(listed: Any) -> Outer:
        made.append(Outer(listed))
        return made[0]

    local, outer = adam(impl, params), impl.KeyedOptimizerWrapper(params, factory)
    optimizer = impl.SemisyncOptimizer(global_params=given, optimizer=local, global_optimizer=outer)
    expect(isinstance(optimizer, impl.KeyedOptimizer), "a KeyedOptimizer", type(optimizer).__mro__)
    expect(isinstance(optimizer, torch.optim.Optimizer), "a torch.optim.Optimizer", type(optimizer).__mro__)
    train(optimizer, params, 33)
    expect_equal(made[0].counts, [16, 32], "local steps at each global step")


@pytest.mark.clause("SEMI-002")
@pytest.mark.parametrize("every", [0, -2, 2.5, "nan", None, "4"])
def test_wrong_number_of_local_steps(impl, every):
    """A num_local_steps that is not a positive whole number raises an error."""
    params = parameters()
    number = math.nan if every == "nan" else every

    def use() -> None:
        train(semisync(impl, params, every=number)[0], params, 1)

    expect_raises(use, ValueError, TypeError, AssertionError, ZeroDivisionError, expected="an error")


@pytest.mark.clause("SEMI-003")
@pytest.mark.parametrize("which", ["local", "global"])
def test_optimizer_without_keys(impl, which):
    """A plain torch optimizer in place of a keyed one raises an error, at the latest on saving."""
    params = parameters()
    listed = [*params.values()]
    local: Any = adam(impl, params)
    outer: Any = impl.KeyedOptimizerWrapper(params, Outer)
    if which == "local":
        local = torch.optim.Adam(listed)
    else:
        outer = Outer(listed)
    expect_raises(
        lambda: impl.SemisyncOptimizer(listed, local, outer).state_dict(),
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
        expected="an error",
    )


@pytest.mark.clause("SEMI-003")
def test_global_optimizer_without_global_step(impl):
    """A global optimizer without global_step raises before a parameter changes."""
    params = parameters()
    before = values(params)

    def use() -> None:
        optimizer = impl.SemisyncOptimizer([*params.values()], adam(impl, params), sgd(impl, params), 2)
        train(optimizer, params, 2)

    kinds = (ValueError, TypeError, AttributeError, AssertionError, NotImplementedError)
    expect_raises(use, *kinds, expected="an error")
    expect_unchanged(before, values(params), "parameters, when the error comes")


@pytest.mark.clause("SEMI-004")
@pytest.mark.parametrize(
    "wrong",
    [None, [], ["p0", "p1"], 3, [{"lr": 0.5}], [{"params": ["p0", "p1"]}], "one of two"],
)
def test_wrong_global_params(impl, wrong):
    """Missing or invalid global parameters raise an error, also among valid ones."""
    params = parameters()
    if wrong == "one of two":
        wrong = [params["p0"], "p1"]
    local, outer = adam(impl, params), impl.KeyedOptimizerWrapper(params, Outer)
    kinds = (ValueError, TypeError, IndexError, KeyError, AssertionError)
    expect_raises(lambda: impl.SemisyncOptimizer(wrong, local, outer), *kinds, expected="an error")


@pytest.mark.clause("SEMI-007")
def test_one_key_for_two_tensors(impl):
    """One key for two tensors raises an error, at the latest when the parameters are read."""
    params = parameters(2)
    others = {"p0": params["p0"], "p1": parameter(3)}
    kinds = (ValueError, AssertionError)
    expect_raises(lambda: semisync(impl, params, outer_params=others)[0].params, *kinds, expected="an error")


@pytest.mark.clause("SEMI-008")
@pytest.mark.parametrize("wrong", ["one key for two tensors", "two keys for one tensor"])
def test_contradicting_keys(impl, wrong):
    """Contradicting keys and tensors raise an error before a step is taken."""
    params = parameters(2)
    second = {"p1": parameter(3)} if wrong == "one key for two tensors" else {"other": params["p1"]}
    others = {"p0": params["p0"], **second}

    def use() -> None:
        optimizer = semisync(impl, params, outer_params=others)[0]
        train(optimizer, params, 1)

    expect_raises(use, ValueError, AssertionError, expected="an error")


@pytest.mark.clause("SEMI-008")
@pytest.mark.parametrize("name", [LOCAL_COUNTER, GLOBAL_COUNTER])
def test_the_key_of_a_counter(impl, name):
    """A parameter with the key of a step counter raises an error before a step is taken."""
    params = {name: parameter(3)}
    optimizers = adam(impl, params), impl.KeyedOptimizerWrapper(params, Outer)

    def use() -> None:
        train(impl.SemisyncOptimizer([*params.values()], *optimizers), params, 1)

    expect_raises(use, ValueError, AssertionError, expected="an error")


@pytest.mark.clause("SEMI-034")
def test_what_is_passed_on(impl):
    """A step count and hyper-parameters reach each optimizer that has the methods; others are skipped."""
    params = parameters()
    made: list[Told] = []

    def factory(listed: Any) -> Told:
        made.append(Told(listed, lr=0.1))
        return made[-1]

    local, outer = (impl.KeyedOptimizerWrapper(params, factory) for _ in range(2))
    optimizer = impl.SemisyncOptimizer([*params.values()], local, outer)
    optimizer.set_optimizer_step(7)
    optimizer.update_hyper_parameters({"lr": 0.3})
    expect_equal([one.told for one in made], [[7, {"lr": 0.3}]] * 2, "calls that reached the optimizers")
    plain = semisync(impl, parameters())[0]
    plain.set_optimizer_step(7)
    plain.update_hyper_parameters({"lr": 0.3})


@pytest.mark.clause("SEMI-036")
@pytest.mark.parametrize("non_blocking", [False, True])
def test_offloading(impl, non_blocking):
    """Offloading changes no number, and trained parameters stay where they are."""

    def make(**options: Any) -> Any:
        params = parameters()
        extra = parameter(4, seed=9)
        every = {**params, "x": extra}
        made = semisync(
            impl,
            params,
            every=2,
            local=adam(impl, params),
            outer_params=every,
            options=options,
            stateless=True,
        )
        return made[0], params, extra

    optimizer, params, extra = make(offload_global_model=True, non_blocking=non_blocking)
    plain, others, other_extra = make()
    for _ in range(5):
        train(optimizer, params, 1)
        train(plain, others, 1)
    expect_unchanged(values(others), values(params), "parameters")
    expect_bits(extra.detach().cpu(), other_extra.detach().cpu(), "parameter of the global optimizer")
    expect_equal(params["p0"].device.type, the_device().type, "device of a trained parameter")


@pytest.mark.clause("SEMI-033")
@pytest.mark.parametrize("wrong", [3, {"lr": 0.1}])
def test_malformed_group(impl, wrong):
    """Adding an object that is not a group raises an error."""
    optimizer = semisync(impl, parameters())[0]
    kinds = (ValueError, TypeError, KeyError, AttributeError, NotImplementedError)
    expect_raises(lambda: optimizer.add_param_group(wrong), *kinds, expected="an error")


@pytest.mark.plain_only("it counts groups")
@pytest.mark.clause("SEMI-033")
def test_new_group(impl):
    """A new group is trained from then on, or adding it raises; it is never silently dropped."""
    params, late = parameters(), parameter(2, seed=7)
    optimizer, *_ = semisync(impl, params)
    before = values([late])
    try:
        optimizer.add_param_group({"params": {"late": late}, "lr": 0.5})
    except Exception:
        expect_equal(len(optimizer.param_groups), 2, "groups after an error")
        expect("late" not in optimizer.params, "no new parameter after an error", list(optimizer.params))
        return
    late.grad = ones(2)
    optimizer.step()
    expect(not torch.equal(late.detach(), before[0]), "the new parameter trained", late)
