"""Warmup: DTensor parameters, schedulers, scalers and modes of torch."""

import copy
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import expect, expect_equal, outcome
from keyedopt.conformance.suite.support.device import arange, ones, tensor, the_device, zeros
from keyedopt.conformance.suite.support.doubles import Recorder, recording, single_rank
from keyedopt.conformance.suite.support.inputs import parameters, set_grads, sgd, warmup_stages
from keyedopt.conformance.suite.support.warmup import expect_poly_rate, poly_ramp, schedule_state


@pytest.mark.clause("WARM-047")
def test_distributed_parameters(impl):
    """A schedule around DTensor parameters advances and resumes as usual."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    with single_rank():
        mesh = init_device_mesh(the_device().type, (1,))

        def build() -> tuple[Any, Any]:
            local = arange(4.0)
            param = torch.nn.Parameter(DTensor.from_local(local, mesh, [Replicate()]))
            return param, poly_ramp(impl, sgd(impl, {"p": param}, momentum=0.9))

        param, optimizer = build()
        twin, resumed = build()
        for _ in range(3):
            param.grad = DTensor.from_local(ones(4), mesh, [Replicate()])
            optimizer.step()
        state = schedule_state(impl, optimizer.state_dict())
        expect(not isinstance(state, DTensor), "a plain tensor as state", type(state).__name__)
        expect_equal(state.tolist(), [3, 0], "state")
        twin.grad = DTensor.from_local(zeros(4), mesh, [Replicate()])
        resumed.step()
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        expect_poly_rate(resumed, 3)


# --- schedulers, scalers and modes of torch -------------------------------------------------------


@pytest.mark.clause("WARM-071")
def test_learning_rate_scheduler(impl):
    """Observe the learning rates that result from a torch scheduler around a schedule."""
    params = parameters()
    inner, recorder = recording(impl, dict(params))
    optimizer = impl.WarmupOptimizer(
        inner, warmup_stages(impl, [{"policy": "CONSTANT", "max_iters": 9, "value": 0.5}]), lr=1.0
    )

    def drive() -> list[float]:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for _ in range(4):
            set_grads(params)
            optimizer.step()
            scheduler.step()
        return [float(rate[0]) for rate in recorder.rates]

    return outcome(drive)


@pytest.mark.clause("WARM-072")
def test_gradient_scaler(impl):
    """A step that a GradScaler skips for overflow does not advance the schedule; others do."""
    params: Any = parameters()
    optimizer = poly_ramp(impl, sgd(impl, dict(params)))
    scaler = torch.amp.GradScaler(the_device().type, init_scale=2.0)
    iteration = 0
    for overflow in (False, True, False, True, False):
        set_grads(params)
        scaler.scale(tensor(1.0))
        if overflow:
            params["p1"].grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        iteration += not overflow
        expect_poly_rate(optimizer, iteration)


@pytest.mark.clause("WARM-073")
@pytest.mark.parametrize("how", ["autocast", "no_grad"])
def test_modes_of_torch(impl, how):
    """The schedule advances equally under autocast and no_grad."""
    params = parameters()
    optimizer = poly_ramp(impl, impl.KeyedOptimizerWrapper(dict(params), Recorder))
    for iteration in range(6):
        expect_poly_rate(optimizer, iteration)
        with torch.autocast(the_device().type) if how == "autocast" else torch.no_grad():
            optimizer.step()
    expect_equal(schedule_state(impl, optimizer.state_dict()).tolist(), [6, 1], "state")
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expect_poly_rate(optimizer, 6)
