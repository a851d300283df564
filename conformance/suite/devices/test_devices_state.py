"""Accelerators: where state is, and checkpoints that move between devices."""

import io
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import ACCUMULATING, make_accumulating
from keyedopt.conformance.suite.support.algorithms import ALGORITHMS, make_algorithm
from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.device import the_device
from keyedopt.conformance.suite.support.inputs import adam, parameter, parameters, set_grads, sgd, train
from keyedopt.conformance.suite.support.second_device import copied_to, elsewhere, other_device, tensors_in

OTHERS = pytest.mark.parametrize("which", ["cpu", "second"])


@pytest.mark.clause("DEV-001")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "SparseAdam"])
def test_state_of_a_step(impl, algorithm):
    """A step creates state on the device of the parameter."""
    weight = parameter(4, 3)
    if algorithm == "SparseAdam":
        optimizer = impl.SparseAdam([weight], lr=0.1)
        weight.grad = parameter(4, 3, seed=1).detach().to_sparse(1)
    else:
        optimizer = make_algorithm(impl, algorithm, [weight])
        set_grads([weight])
    optimizer.step()
    expect_equal(elsewhere(optimizer.state[weight], the_device()), [], "devices of other state")


@pytest.mark.clause("DEV-001")
@pytest.mark.needs("{kind}")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_state_of_a_window(impl, kind):
    """An open window is on the device of the parameter."""
    weight = parameter(4, 3)
    optimizer = make_accumulating(impl, kind, [weight], window=3)
    train(optimizer, [weight], 2)
    expect_equal(elsewhere(optimizer.state_dict()["state"], the_device()), [], "devices of other state")


@pytest.mark.clause("DEV-002")
@pytest.mark.needs("KeyedOptimizerWrapper")
def test_init_state(impl):
    """init_state creates state and gradients on the device of each parameter."""
    params = parameters(2)
    params["other"] = copied_to(other_device("second"), {"x": parameter(3, seed=5)})["x"]
    optimizer = adam(impl, params)
    optimizer.init_state()
    for key, param in params.items():
        expect_equal(elsewhere([optimizer.state[param], param.grad], param.device), [], f"devices for {key}")


@pytest.mark.clause("DEV-003")
@pytest.mark.needs("KeyedOptimizerWrapper")
@OTHERS
def test_load_from_another_device(impl, which):
    """Loading a checkpoint from another device fills the live tensors, which stay where they are."""
    params = parameters(2)
    others = copied_to(other_device(which), params)
    saved, optimizer = adam(impl, others), adam(impl, params)
    train(saved, others, 3)
    train(optimizer, params, 1)
    live = {key: optimizer.state[param]["exp_avg"] for key, param in params.items()}
    optimizer.load_state_dict(saved.state_dict())
    for key, param in params.items():
        now = optimizer.state[param]["exp_avg"]
        expect(now is live[key], f"the same tensor for {key}", "another tensor")
        expect_bits(now, saved.state[others[key]]["exp_avg"], f"state of {key}")
        expect_equal(elsewhere(optimizer.state[param], the_device()), [], f"devices of state of {key}")


@pytest.mark.clause("DEV-004")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mapped", ["as saved", "cpu", "second"])
def test_resume_on_another_index(impl, algorithm, mapped):
    """A checkpoint resumes on another index of the device, bit by bit, however torch.load maps it."""
    there = other_device("second")
    weight = {"w": parameter(4, 3)}
    optimizer = make_algorithm(impl, algorithm, [weight["w"]])
    train(optimizer, weight, 2)
    file = io.BytesIO()
    torch.save({"weight": weight["w"].detach(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    place = {"as saved": None, "cpu": "cpu", "second": str(there)}[mapped]
    loaded = torch.load(file, map_location=place, weights_only=True)
    moved = torch.nn.Parameter(loaded["weight"].to(there))
    resumed = make_algorithm(impl, algorithm, [moved])
    resumed.load_state_dict(loaded["optimizer"])
    expect_equal(elsewhere(resumed.state[moved], there), [], "devices of loaded state")
    train(optimizer, weight, 2, seed=7)
    train(resumed, {"w": moved}, 2, seed=7)
    expect_bits(moved, weight["w"], "the weight after resuming")


@pytest.mark.clause("DEV-004")
@pytest.mark.needs("{kind}")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_resume_a_window_on_another_index(impl, kind):
    """An open window resumes on another index of the device, bit by bit."""
    there = other_device("second")
    weight = {"w": parameter(4, 3)}
    optimizer = make_accumulating(impl, kind, [weight["w"]], window=3)
    train(optimizer, weight, 2)
    moved = copied_to(there, weight)
    resumed = make_accumulating(impl, kind, [moved["w"]], window=3)
    resumed.load_state_dict(snapshot(optimizer.state_dict()))
    train(optimizer, weight, 4, seed=7)
    train(resumed, moved, 4, seed=7)
    expect_bits(moved["w"], weight["w"], "the weight after resuming")


@pytest.mark.clause("DEV-005")
@pytest.mark.needs("CombinedOptimizer", "KeyedOptimizerWrapper")
@OTHERS
def test_members_on_two_devices(impl, which):
    """A combination over two devices saves, and loads into one whose members are the other way round."""
    here, there = the_device(), other_device(which)

    def combined(first: Any, second: Any) -> tuple[Any, dict[str, Any]]:
        one = copied_to(first, {"p": parameter(3, seed=1)})
        two = copied_to(second, {"p": parameter(2, 2, seed=2)})
        whole = impl.CombinedOptimizer([("a", adam(impl, one)), ("b", sgd(impl, two, momentum=0.9))])
        return whole, {"a": one["p"], "b": two["p"]}

    (old, params), (new, others) = combined(here, there), combined(there, here)
    train(old, params, 3)
    train(new, others, 1, seed=9)
    before = [tensor.device for tensor in tensors_in(list(new.state.values()))]
    new.load_state_dict(old.state_dict())
    after = [tensor.device for tensor in tensors_in(list(new.state.values()))]
    expect_equal(after, before, "devices of state after the load")
    saved = snapshot(old.state_dict()["state"])
    expect_unchanged(saved, new.state_dict()["state"], "state after the load")


@pytest.mark.clause("DEV-006")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_parameter_that_moves(impl, algorithm):
    """A parameter whose data moves to another index trains on as if it had not, or the step raises."""
    expect_trained_where_it_moves(impl, algorithm, 2)


@pytest.mark.clause("DEV-006")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_parameter_that_moves_first(impl, algorithm):
    """A parameter whose data moves before its first step trains as if it had not, or the step raises."""
    expect_trained_where_it_moves(impl, algorithm, 0)


def expect_trained_where_it_moves(impl: Any, algorithm: str, steps: int) -> None:
    """Expect the step after a move to train like one without a move, or to raise."""
    there = other_device("second")
    weight, moved = parameter(4, 3), parameter(4, 3)
    plain, optimizer = (make_algorithm(impl, algorithm, [one]) for one in (weight, moved))
    train(plain, [weight], steps)
    train(optimizer, [moved], steps)
    moved.data, moved.grad = moved.detach().to(there), None
    before = snapshot(moved.detach())
    train(plain, [weight], 1, seed=7)
    set_grads([moved], seed=7)
    try:
        optimizer.step()
    except (RuntimeError, ValueError):
        expect_bits(moved.detach(), before, "the weight after an error")
        return
    expect_bits(moved, weight, "the weight")
