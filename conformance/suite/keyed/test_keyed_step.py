"""Keyed optimizers: steps, closures, gradients, schedulers, scalers, autocast and compiling."""

import functools
import warnings

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_raises,
    outcome,
    snapshot,
)
from keyedopt.conformance.suite.support.device import ones, tensor, the_device
from keyedopt.conformance.suite.support.doubles import recording
from keyedopt.conformance.suite.support.inputs import (
    adam,
    parameter,
    parameters,
    set_grads,
    sgd,
    train,
    values,
)


class Growing(torch.optim.Optimizer):
    """An optimizer that creates a part of its state only in its second step."""

    def __init__(self, listed, nested=False):
        super().__init__(listed, {"lr": 0.1, "nested": nested})

    def step(self, closure=None):
        """Count, and add state in the second step."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                entry = self.state[param]
                if not entry:
                    entry["m"], entry["deep"] = torch.zeros_like(param), {}
                elif group["nested"]:
                    entry["deep"]["late"] = torch.zeros_like(param)
                else:
                    entry["late"] = torch.zeros_like(param)


@pytest.mark.clause("KEYED-088")
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "AdamW", "RMSprop"])
def test_a_wrapped_optimizer_trains_like_itself(impl, name, dtype):
    """A keyed optimizer around a torch optimizer gives the same parameters, bit by bit."""
    params, others = parameters(2, dtype=dtype), parameters(2, dtype=dtype)
    factory = functools.partial(getattr(torch.optim, name), lr=0.1)
    optimizer, plain = impl.KeyedOptimizerWrapper(params, factory), factory(list(others.values()))
    train(optimizer, params, 4)
    train(plain, others, 4)
    for key, param in others.items():
        expect_bits(params[key], param, f"{key} after four steps of {name}")


@pytest.mark.clause("KEYED-089")
def test_a_closure_is_evaluated_with_gradients(impl):
    """A step evaluates its closure with gradients enabled and uses its gradients."""
    params, others = parameters(1), parameters(1)
    optimizer, plain = sgd(impl, params), torch.optim.SGD(list(others.values()), lr=0.1)
    seen = []

    def closure_of(param, own):
        def closure():
            seen.append(torch.is_grad_enabled())
            own.zero_grad()
            loss = (param * param).sum()
            loss.backward()
            return loss

        return closure

    with torch.no_grad():
        optimizer.step(closure_of(params["p0"], optimizer))
    expect_equal(seen, [True], "gradients enabled, at each evaluation")
    plain.step(closure_of(others["p0"], plain))
    expect_bits(params["p0"], others["p0"], "the parameter after a step with a closure")


@pytest.mark.clause("KEYED-089")
@pytest.mark.parametrize("evaluations", [1, 3])
def test_a_closure_is_evaluated_as_often_as_asked(impl, evaluations):
    """The inner optimizer receives the closure and evaluates it repeatedly."""
    params = parameters(1)
    optimizer, recorder = recording(impl, params, evaluations=evaluations)
    calls = []

    def closure():
        calls.append(1)
        set_grads(params, seed=len(calls))
        return 1.0

    optimizer.step(closure=closure)
    expect_equal(len(calls), evaluations, "evaluations of the closure")
    expect_equal(len(recorder.received), evaluations, "received gradients")


@pytest.mark.clause("KEYED-090")
def test_what_step_returns(impl):
    """Observe what step returns with and without a closure."""
    params = parameters(1)
    optimizer = sgd(impl, params)
    return [outcome(lambda: optimizer.step(lambda: 2.5)), outcome(optimizer.step)]


@pytest.mark.clause("KEYED-091")
@pytest.mark.parametrize("kind", ["dense", "sparse", "nan"])
def test_zero_grad_sets_gradients_to_zero(impl, kind, dtype):
    """zero_grad() and zero_grad(set_to_none=False) zero gradients in every group."""
    params = {"p0": parameter(4, 2, dtype=dtype), "p1": parameter(4, 2, dtype=dtype)}
    optimizer = impl.KeyedOptimizerWrapper(
        params, lambda listed: torch.optim.SGD([{"params": [param]} for param in listed], lr=0.1)
    )
    number = getattr(torch, dtype)
    for arguments in ({}, {"set_to_none": False}):
        if kind != "sparse":
            set_grads(params, scale=float("nan") if kind == "nan" else 1.0)
        else:
            rows = tensor([[0, 2]])
            for param in params.values():
                param.grad = torch.sparse_coo_tensor(rows, ones(2, 2, dtype=number), (4, 2))
        optimizer.zero_grad(**arguments)
        for key, param in params.items():
            expect(
                param.grad is not None, f"a gradient of zeros for {key} after zero_grad({arguments})", "None"
            )
            expect_bits(param.grad.to_dense(), torch.zeros(4, 2, dtype=number), f"the gradient of {key}")


@pytest.mark.clause("KEYED-092")
def test_zero_grad_drops_gradients_on_demand(impl):
    """zero_grad(set_to_none=True) removes gradients; missing ones are allowed."""
    params = parameters(2)
    optimizer = sgd(impl, params)
    set_grads({"p0": params["p0"]})
    optimizer.zero_grad(set_to_none=True)
    expect(all(param.grad is None for param in params.values()), "no gradients", params["p0"].grad)
    optimizer.zero_grad(set_to_none=True)
    optimizer.zero_grad()
    expect(params["p1"].grad is None, "still no gradient", params["p1"].grad)


@pytest.mark.clause("KEYED-092")
def test_zero_grad_of_a_keyed_optimizer(impl):
    """zero_grad of a plain keyed optimizer respects set_to_none, in all groups."""
    params = parameters(2)
    groups = [{"params": [params["p0"]]}, {"params": [params["p1"], params["p0"]]}]
    optimizer = impl.KeyedOptimizer(params, {}, groups)
    set_grads(params)
    optimizer.zero_grad(set_to_none=False)
    for key, param in params.items():
        expect_bits(param.grad, torch.zeros(3), f"gradient of {key}")
    optimizer.zero_grad(set_to_none=True)
    expect(all(param.grad is None for param in params.values()), "no gradients", params["p0"].grad)


@pytest.mark.clause("KEYED-093")
def test_parameters_without_gradient_are_left_alone(impl):
    """A parameter without a gradient does not change and has no state yet."""
    params = parameters(2)
    optimizer = adam(impl, params)
    before = values(params)
    set_grads({"p0": params["p0"]})
    optimizer.step()
    optimizer.step()
    expect_bits(params["p1"], before[1], "the parameter without gradient")
    expect_equal(list(optimizer.state_dict()["state"]), ["p0"], "keys of the state")
    set_grads(params)
    optimizer.step()
    expect_equal(sorted(optimizer.state_dict()["state"]), ["p0", "p1"], "keys of the state")
    expect(not torch.equal(params["p1"], before[1]), "a parameter that trains", params["p1"])


@pytest.mark.clause("KEYED-094")
def test_sparse_and_empty_gradients_reach_the_optimizer(impl):
    """Sparse, uncoalesced and empty gradients train as without keys."""
    params, others = {"p0": parameter(4, 2)}, {"p0": parameter(4, 2)}
    make = functools.partial(torch.optim.SparseAdam, lr=0.1)
    optimizer, plain = impl.KeyedOptimizerWrapper(params, make), make(list(others.values()))
    for rows in ([0, 2], [1, 1], []):
        for listed, own in ((params, optimizer), (others, plain)):
            indices = tensor([rows], dtype=torch.int64)
            listed["p0"].grad = torch.sparse_coo_tensor(indices, ones(len(rows), 2), (4, 2))
            own.step()
    expect_bits(params["p0"], others["p0"], "the parameter after three steps")


@pytest.mark.clause("KEYED-095")
@pytest.mark.parametrize("special", ["nan", "inf"])
def test_a_non_finite_gradient_stays_where_it_is(impl, special):
    """A non-finite gradient does not affect parameters or state of other keys."""
    params, others = parameters(2), parameters(2)
    optimizer, clean = adam(impl, params), adam(impl, others)
    set_grads(params)
    set_grads(others)
    params["p0"].grad[1] = float(special)
    optimizer.step()
    clean.step()
    expect_bits(params["p1"], others["p1"], "the parameter with a finite gradient")
    expect_bits(optimizer.state[params["p1"]]["exp_avg"], clean.state[others["p1"]]["exp_avg"], "its state")


@pytest.mark.clause("KEYED-096")
@pytest.mark.parametrize("nested", [False, True])
def test_state_that_comes_after_the_first_step_is_an_error(impl, nested):
    """New state entries after the first step raise an error."""
    params = parameters(1)
    optimizer = impl.KeyedOptimizerWrapper(params, functools.partial(Growing, nested=nested))
    set_grads(params)
    optimizer.step()
    for when in ("in the step that adds state", "in the next step, if the first error was caught"):
        expect_raises(
            optimizer.step,
            RuntimeError,
            ValueError,
            mentions=["p0"],
            expected=f"an error {when}: what was saved before will not load",
        )


@pytest.mark.clause("KEYED-099")
def test_a_scheduler_of_torch_sets_the_rate(impl):
    """An LRScheduler changes the learning rate that the next step uses."""
    params, others = parameters(1), parameters(1)
    optimizer, plain = sgd(impl, params), torch.optim.SGD(list(others.values()), lr=0.1)
    one = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    other = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning "step called before optimizer.step()" would be wrong
        for _ in range(3):
            train(optimizer, params, 1)
            train(plain, others, 1)
            one.step()
            other.step()
    expect_bits(params["p0"], others["p0"], "the parameter after three steps")


@pytest.mark.clause("KEYED-110")
@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_a_scheduler_that_cycles_momentum(impl, name):
    """OneCycleLR works around Adam and around SGD with momentum, as it does without keys."""
    params, others = parameters(1), parameters(1)
    options = {"momentum": 0.9} if name == "SGD" else {}
    factory = functools.partial(getattr(torch.optim, name), lr=0.1, **options)
    optimizer, plain = impl.KeyedOptimizerWrapper(params, factory), factory(list(others.values()))
    one = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=5)
    other = torch.optim.lr_scheduler.OneCycleLR(plain, max_lr=0.5, total_steps=5)
    for _ in range(3):
        train(optimizer, params, 1)
        train(plain, others, 1)
        one.step()
        other.step()
    expect_bits(params["p0"], others["p0"], "the parameter after three steps")


@pytest.mark.clause("KEYED-100")
@pytest.mark.parametrize("overflow", [False, True])
def test_a_grad_scaler_steps_or_skips(impl, overflow):
    """A GradScaler unscales, steps, and skips the step if a gradient is not finite."""
    params = parameters(1)
    optimizer = adam(impl, params)
    scaler = torch.amp.GradScaler(the_device().type, init_scale=1024.0)
    before = values(params)
    loss = (params["p0"] * (float("inf") if overflow else 1.0)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if overflow:
        expect_bits(params["p0"], before[0], "the parameter after a skipped step")
        expect_equal(len(optimizer.state), 0, "entries of state after a skipped step")
    else:
        moment = optimizer.state[params["p0"]]["exp_avg"]
        expect_bits(moment, torch.full((3,), 0.1).mul(1.0), "the moment of unscaled gradients")


@pytest.mark.plain_only("it takes seconds")
@pytest.mark.clause("KEYED-101")
def test_a_compiled_step_trains_alike(impl):
    """A step under torch.compile gives the parameters that the plain step gives."""
    params, others = parameters(1), parameters(1)
    optimizer, plain = sgd(impl, params, momentum=0.9), sgd(impl, others, momentum=0.9)
    compiled = torch.compile(optimizer.step, backend="eager")
    for step in range(3):
        set_grads(params, seed=step)
        set_grads(others, seed=step)
        compiled()
        plain.step()
    expect_bits(params["p0"], others["p0"], "the parameter after three compiled steps")


@pytest.mark.clause("KEYED-102")
def test_autocast_does_not_change_a_step(impl):
    """Under torch.autocast steps, saving and loading keep their dtypes."""
    params, others = parameters(1), parameters(1)
    optimizer, plain = adam(impl, params), adam(impl, others)
    train(plain, others, 2)
    with torch.autocast(the_device().type, dtype=torch.bfloat16):
        optimizer.init_state()
        train(optimizer, params, 2)
        optimizer.load_state_dict(snapshot(plain.state_dict()))
        saved = optimizer.state_dict()
    expect_equal(str(saved["state"]["p0"]["exp_avg"].dtype), "torch.float32", "dtype of the state")
    moment = plain.state[others["p0"]]["exp_avg"]
    expect_bits(saved["state"]["p0"]["exp_avg"], moment, "the loaded state")
