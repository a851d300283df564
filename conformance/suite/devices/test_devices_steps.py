"""Accelerators: steps over several devices, without waiting for the host."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.algorithms import ALGORITHMS, make_algorithm
from keyedopt.conformance.suite.support.assertions import (
    exactly,
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    p_norm,
    same_bits,
)
from keyedopt.conformance.suite.support.device import tensor, the_device
from keyedopt.conformance.suite.support.doubles import clipping
from keyedopt.conformance.suite.support.in_backward import apply_in_backward
from keyedopt.conformance.suite.support.inputs import (
    adam,
    give_grads,
    parameter,
    parameters,
    set_grads,
    set_sparse_grad,
    sgd,
    train,
)
from keyedopt.conformance.suite.support.second_device import copied_to, elsewhere, other_device
from keyedopt.conformance.suite.support.synchronizations import host_synchronizations
from keyedopt.conformance.suite.support.torch_optimizers import torch_factory
from keyedopt.conformance.suite.support.warmup import poly_ramp

EVERY = pytest.mark.parametrize("algorithm", ALGORITHMS)
OTHERS = pytest.mark.parametrize("which", ["cpu", "second"])


@pytest.mark.clause("DEV-007")
@pytest.mark.needs("{algorithm}")
@EVERY
@OTHERS
def test_two_devices(impl, algorithm, which):
    """Parameters of one optimizer on two devices train like those of two optimizers."""
    here = {"p": parameter(4, 3)}
    there = copied_to(other_device(which), {"q": parameter(2, 3, seed=1)})
    both, alone = copied_to(the_device(), here), copied_to(there["q"].device, there)
    start = {"p": here["p"].detach().clone(), "q": there["q"].detach().clone()}
    together = make_algorithm(impl, algorithm, [both["p"], alone["q"]])
    apart = [make_algorithm(impl, algorithm, [one]) for one in (here["p"], there["q"])]
    for step in range(3):
        for param in (here["p"], both["p"]):
            set_grads([param], seed=step)
        for param in (there["q"], alone["q"]):
            set_grads([param], seed=10 + step)
        for optimizer in (together, *apart):
            optimizer.step()
    for key, seen, wanted in (("p", both["p"], here["p"]), ("q", alone["q"], there["q"])):
        expect(not same_bits(wanted, start[key]), f"the parameter on {wanted.device} trained", "no change")
        expect_bits(seen, wanted, f"the parameter on {wanted.device}")


@pytest.mark.clause("DEV-008")
@pytest.mark.needs("GradientClippingOptimizer")
@OTHERS
def test_one_norm(impl, which):
    """Clipping by norm takes one norm of the gradients on all devices."""
    params = {"p": torch.nn.Parameter(tensor([0.0, 0.0]))}
    params["p"].grad = tensor([3.0, 4.0])
    there = {"q": torch.nn.Parameter(tensor([0.0]))}
    there["q"].grad = tensor([12.0])
    params |= copied_to(other_device(which), there)
    optimizer, recorder = clipping(impl, params, "NORM", 1.0)
    optimizer.step()
    factor = 1.0 / (p_norm([3.0, 4.0, 12.0]) + 1e-6)
    for seen, grad in zip(recorder.received[0], ([3.0, 4.0], [12.0]), strict=True):
        expect_close(seen, exactly(torch.tensor(grad)) * factor, "received gradient", ulps=16)


@pytest.mark.clause("DEV-008")
@pytest.mark.needs("GradientClippingOptimizer.track_grad_norm")
@OTHERS
def test_tracked_norm(impl, which):
    """The tracked norm is that of the gradients on all devices."""
    params = parameters(1)
    params |= copied_to(other_device(which), {"q": parameter(3, seed=3)})
    set_grads(params)
    numbers = [number for param in params.values() for number in param.grad.tolist()]
    optimizer, _ = clipping(impl, params, "VALUE", 0.25, track_grad_norm=True)
    optimizer.step()
    expect_close(float(optimizer.last_total_grad_norm), p_norm(numbers), "the norm", ulps=2.0**31)


@pytest.mark.clause("DEV-009")
@pytest.mark.needs("GradientClippingOptimizer")
@OTHERS
def test_values_on_two_devices(impl, which):
    """Clipping by value clips the gradients on every device."""
    params = parameters(1)
    params |= copied_to(other_device(which), {"q": parameter(3, seed=3)})
    set_grads(params)
    wanted = [exactly(param.grad).clamp(-0.25, 0.25) for param in params.values()]
    optimizer, recorder = clipping(impl, params, "VALUE", 0.25)
    optimizer.step()
    for seen, exact in zip(recorder.received[0], wanted, strict=True):
        expect_close(seen, exact, "received gradient", ulps=0)


@pytest.mark.clause("DEV-010")
@pytest.mark.needs("{algorithm}")
@EVERY
def test_rate_on_the_device(impl, algorithm):
    """A learning rate that is a tensor on the device, and is changed in place, is read at each step."""
    rate = tensor(0.5)
    weight, plain = parameter(4, 3), parameter(4, 3)
    optimizer = make_algorithm(impl, algorithm, [weight], lr=rate)
    other = make_algorithm(impl, algorithm, [plain], lr=0.5)
    for step, value in enumerate((0.5, 0.25, 0.125)):
        rate.fill_(value)
        other.param_groups[0]["lr"] = value
        for one, param in ((optimizer, weight), (other, plain)):
            set_grads([param], seed=step)
            one.step()
    expect_close(weight, exactly(plain), "the weight", ulps=64)
    expect_equal(elsewhere(optimizer.state[weight], the_device()), [], "devices of other state")


@pytest.mark.clause("DEV-011")
@pytest.mark.needs("KeyedOptimizerWrapper")
def test_step_counts_on_the_device(impl):
    """Step counts on the device, of a capturable optimizer of torch, are saved, loaded and used."""
    adam, params, others = torch_factory(torch.optim.Adam, capturable=True), parameters(2), parameters(2)
    old, new = (impl.KeyedOptimizerWrapper(some, adam) for some in (params, others))
    train(old, params, 3)
    train(new, others, 1, seed=9)
    for key, param in params.items():
        others[key].data.copy_(param.data)
    new.load_state_dict(old.state_dict())
    for key, param in params.items():
        step = new.state[others[key]]["step"]
        expect_equal((step.device.type, float(step)), (the_device().type, 3.0), f"step count of {key}")
        expect_bits(step, old.state[param]["step"], f"step count of {key}")
    train(old, params, 2, seed=7)
    train(new, others, 2, seed=7)
    for key, param in params.items():
        expect_bits(others[key], param, f"{key} after resuming")


@pytest.mark.clause("DEV-012")
@pytest.mark.needs("{algorithm}")
@EVERY
def test_no_wait_in_a_step(impl, algorithm):
    """A step with dense gradients does not wait for the device."""
    weights = [parameter(4, 3, seed=seed) for seed in range(2)]
    optimizer = make_algorithm(impl, algorithm, weights)
    train(optimizer, weights, 2)
    set_grads(weights, seed=9)
    with host_synchronizations(the_device()) as waits:
        optimizer.step()
    expect_equal(waits, [], "waits of the host")


@pytest.mark.clause("DEV-013")
@pytest.mark.needs("GradientClippingOptimizer")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_no_wait_in_clipping(impl, kind):
    """Clipping does not wait for the device."""
    params = parameters(2)
    keyed = sgd(impl, params)
    optimizer = impl.GradientClippingOptimizer(keyed, getattr(impl.GradientClipping, kind), 0.5)
    train(optimizer, params, 2)
    set_grads(params, seed=9)
    with host_synchronizations(the_device()) as waits:
        optimizer.step()
    expect_equal(waits, [], "waits of the host")


@pytest.mark.clause("DEV-013")
@pytest.mark.needs("WarmupOptimizer", "CombinedOptimizer")
def test_no_wait_in_a_stack(impl):
    """A schedule around a combination does not wait for the device."""
    params = [parameter(3, seed=1), parameter(2, 2, seed=2)]
    members = [("a", sgd(impl, {"p": params[0]})), ("b", sgd(impl, {"p": params[1]}, momentum=0.9))]
    optimizer = poly_ramp(impl, impl.CombinedOptimizer(members))
    train(optimizer, params, 2)
    set_grads(params, seed=9)
    with host_synchronizations(the_device()) as waits:
        optimizer.step()
    expect_equal(waits, [], "waits of the host")


@pytest.mark.clause("DEV-014")
@pytest.mark.needs("{algorithm}")
@EVERY
def test_current_device(impl, algorithm):
    """A step with a parameter on another index leaves the current device as it is."""
    module = torch.get_device_module(the_device())
    weight = copied_to(other_device("second"), {"w": parameter(4, 3)})
    before = module.current_device()
    optimizer = make_algorithm(impl, algorithm, [weight["w"]])
    train(optimizer, weight, 2)
    expect_equal(module.current_device(), before, "the current device")


@pytest.mark.clause("DEV-015")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "SparseAdam"])
def test_sparse_gradients(impl, algorithm, dtype):
    """Sparse gradients on the device give what they give on the CPU, and other rows keep their bits."""
    weight = {"w": parameter(5, 3, dtype=dtype)}
    start = weight["w"].detach().clone()
    host = copied_to(torch.device("cpu"), weight)
    for param in (weight["w"], host["w"]):
        optimizer = getattr(impl, algorithm)([param], lr=0.1)
        for step in range(3):
            set_sparse_grad(param, [3, 0, 3], seed=step)
            optimizer.step()
    expect_close(weight["w"], exactly(host["w"]), "the weight", ulps=64)
    expect_bits(weight["w"].detach()[[1, 2, 4]], start[[1, 2, 4]], "rows without a gradient")


@pytest.mark.clause("DEV-016")
@pytest.mark.needs("apply_optimizer_in_backward")
def test_backward_on_another_index(impl):
    """An optimizer in the backward pass trains on another index as on the first, and leaves it current."""
    module = torch.get_device_module(the_device())
    here = {"p": parameter(4, 3)}
    there = copied_to(other_device("second"), here)
    before = module.current_device()
    for params in (here, there):
        apply_in_backward(impl, torch.optim.SGD, params.values())
        for seed in range(2):
            factors = parameter(4, 3, seed=seed).detach().to(params["p"].device)
            (params["p"] * factors).sum().backward()
    expect_bits(there["p"], here["p"], "the parameter")
    expect_equal(module.current_device(), before, "the current device")


def train_unseeded(optimizer: Any, weight: Any) -> None:
    """Take three steps as `train` does, but without setting the state of the random numbers."""
    for step in range(3):
        give_grads([weight], seed=step)
        optimizer.step()


@pytest.mark.clause("DEV-017")
@pytest.mark.needs("{algorithm}")
@EVERY
def test_deterministic(impl, algorithm):
    """With torch's deterministic algorithms two trainings are equal bit by bit, or a step raises."""
    weights = [parameter(64, 3) for _ in range(2)]
    torch.use_deterministic_algorithms(True)
    try:
        for weight in weights:
            train_unseeded(make_algorithm(impl, algorithm, [weight]), weight)
    except RuntimeError as error:
        expect("deterministic" in str(error), "an error of torch about deterministic algorithms", str(error))
        return
    finally:
        torch.use_deterministic_algorithms(False)
    expect_bits(weights[1], weights[0], "the weight")


@pytest.mark.clause("DEV-018")
@pytest.mark.needs("{algorithm}")
@EVERY
def test_random_numbers(impl, algorithm):
    """A step draws no random number of the device."""
    module = torch.get_device_module(the_device())
    weight = parameter(4, 3)
    optimizer = make_algorithm(impl, algorithm, [weight])
    before = module.get_rng_state()
    train_unseeded(optimizer, weight)
    expect_bits(module.get_rng_state(), before, "the state of the generator")


@pytest.mark.clause("DEV-019")
@pytest.mark.needs("WarmupOptimizer", "GradientClippingOptimizer")
def test_a_stack_on_another_index(impl):
    """Clipping and a schedule around Adam train on another index as on the first, bit by bit."""
    here = parameters(2)
    there = copied_to(other_device("second"), here)
    for params in (here, there):
        bound = impl.GradientClippingOptimizer(adam(impl, params), impl.GradientClipping.NORM, 0.5)
        train(poly_ramp(impl, bound), params, 4)
    for key, param in here.items():
        expect_bits(there[key], param, key)
