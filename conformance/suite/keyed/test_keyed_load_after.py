"""Keyed optimizers: events after a load, and unusual loads."""

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import expect_bits, expect_equal, outcome, snapshot
from keyedopt.conformance.suite.support.device import full, ones, tensor, zeros
from keyedopt.conformance.suite.support.inputs import parameter, parameters, sgd, train, values


@pytest.mark.clause("KEYED-038")
def test_after_a_load(impl):
    """post_load_state_dict is called once after each completed load, and sees the loaded state."""
    seen = []

    class Noting(impl.KeyedOptimizer):
        def post_load_state_dict(self):
            seen.append(float(self.state_dict()["state"]["p0"]["m"][0]))

    params = parameters(1)
    optimizer = Noting(params, {params["p0"]: {"m": ones(3)}}, [])
    optimizer.load_state_dict({"state": {"p0": {"m": full((3,), 4.0)}}})
    expect_equal(seen, [4.0], "what post_load_state_dict saw")
    outcome(lambda: optimizer.load_state_dict({"state": {}}))
    expect_equal(seen, [4.0], "what it saw after a failed load")


@pytest.mark.clause("KEYED-039")
def test_a_good_load_after_a_refused_one(impl):
    """After a load that raised, the correct checkpoint loads and training continues."""
    params = parameters(2)
    optimizer = sgd(impl, params, momentum=0.9)
    train(optimizer, params, 2)
    saved, at = snapshot(optimizer.state_dict()), values(params)
    train(optimizer, params, 2, seed=30)
    wanted = values(params)
    broken = snapshot(saved)
    broken["state"]["p1"]["momentum_buffer"] = zeros(7)
    outcome(lambda: optimizer.load_state_dict(broken))
    with torch.no_grad():
        for param, value in zip(params.values(), at, strict=True):
            param.copy_(value)
    optimizer.load_state_dict(saved)
    train(optimizer, params, 2, seed=30)
    for param, value in zip(params.values(), wanted, strict=True):
        expect_bits(param, value, "the parameter after resuming")


@pytest.mark.clause("KEYED-040")
def test_sparse_state(impl):
    """State with a sparse layout is saved and loaded like other state."""
    params, others = {"p0": parameter(4, 2)}, {"p0": parameter(4, 2)}
    old, new = sgd(impl, params, momentum=0.9), sgd(impl, others, momentum=0.9)
    for step, optimizer in enumerate((old, old, new)):
        listed = params if optimizer is old else others
        rows = tensor([[step, 3]])
        listed["p0"].grad = torch.sparse_coo_tensor(rows, ones(2, 2), (4, 2))
        optimizer.step()
    new.load_state_dict(snapshot(old.state_dict()))
    loaded = new.state[others["p0"]]["momentum_buffer"].to_dense()
    expect_bits(loaded, old.state[params["p0"]]["momentum_buffer"].to_dense(), "the loaded buffer")


@pytest.mark.clause("KEYED-109")
def test_state_that_the_inner_optimizer_loaded_itself(impl):
    """After the inner optimizer loads, the wrapper saves and loads its state."""
    params, others = parameters(1), parameters(1)
    inner, old = (
        torch.optim.Adam(list(params.values()), lr=0.1),
        torch.optim.Adam(list(others.values()), lr=0.5),
    )
    optimizer = impl.KeyedOptimizerWrapper(params, lambda listed: inner)
    optimizer.save_param_groups(True)
    train(optimizer, params, 1)
    train(old, others, 3)
    inner.load_state_dict(snapshot(old.state_dict()))
    saved = optimizer.state_dict()
    expect_bits(saved["state"]["p0"]["exp_avg"], old.state[others["p0"]]["exp_avg"], "the saved moment")
    expect_equal(saved["param_groups"][0]["lr"], 0.5, "the saved learning rate")
    given = snapshot(saved)
    given["state"]["p0"]["exp_avg"].fill_(4.0)
    optimizer.load_state_dict(given)
    expect_bits(inner.state[params["p0"]]["exp_avg"], torch.full((3,), 4.0), "the loaded moment")
