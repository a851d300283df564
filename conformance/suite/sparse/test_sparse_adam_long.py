"""SparseAdam with options by group, after many steps, and on long gradients."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.device import arange, tensor, zeros
from keyedopt.conformance.suite.support.inputs import parameter, set_sparse_grad, train_sparse

#: Two values of an option.
PAIRS: dict[str, tuple[Any, Any]] = {
    "betas": ((0.9, 0.999), (0.5, 0.75)),
    "eps": (1e-8, 0.125),
    "maximize": (False, True),
}


@pytest.mark.clause("SPARSE-002")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
@pytest.mark.parametrize("option", PAIRS)
@pytest.mark.parametrize("way", ["constructor", "added", "set"])
def test_each_option_of_a_group(impl, option, way):
    """Each option of a group applies, whatever its value in other groups and by default."""
    for pair in (PAIRS[option], PAIRS[option][::-1]):
        together = [parameter(5, 2, seed=index) for index in range(2)]
        apart = [parameter(5, 2, seed=index) for index in range(2)]
        first, second = ({option: value} for value in pair)
        if way == "constructor":
            groups = [{"params": [together[0]], **first}, {"params": [together[1]], **second}]
            optimizer = impl.SparseAdam(groups, lr=0.1)
        elif way == "added":
            optimizer = impl.SparseAdam([together[0]], lr=0.1, **first)
            optimizer.add_param_group({"params": [together[1]], **second})
        else:
            optimizer = impl.SparseAdam([{"params": [weight]} for weight in together], lr=0.1, **first)
            optimizer.param_groups[1].update(second)
        others = [
            impl.SparseAdam([weight], lr=0.1, **more)
            for weight, more in zip(apart, (first, second), strict=True)
        ]
        for step in range(3):
            for weights in (together, apart):
                for weight in weights:
                    set_sparse_grad(weight, [0, 3, 0], seed=step + 1)
            for one in (optimizer, *others):
                one.step()
        for index in range(2):
            what = f"weight of the group with {option}={pair[index]!r}"
            expect_close(together[index].detach(), apart[index].detach().double(), what)


@pytest.mark.clause("SPARSE-083")
@pytest.mark.parametrize("count", [99, 999, 9999])
def test_late_steps(impl, count):
    """The bias correction follows its formula at any count."""
    weight = torch.nn.Parameter(zeros(3, 2))
    optimizer = impl.SparseAdam([weight], lr=0.1, betas=(0.75, 0.9999))
    set_sparse_grad(weight, [0])
    optimizer.step()
    saved = snapshot(optimizer.state_dict())
    (state,) = saved["state"].values()
    step = state["step"]
    state["step"] = torch.full_like(step, count) if isinstance(step, torch.Tensor) else count
    optimizer.load_state_dict(saved)
    rows = tensor([[1]])
    weight.grad = torch.sparse_coo_tensor(rows, tensor([[2.0, -2.0]]), (3, 2), check_invariants=True)
    optimizer.step()
    m, v = 0.25 * 2.0 / (1 - 0.75 ** (count + 1)), 1e-4 * 4.0 / (1 - 0.9999 ** (count + 1))
    moved = 0.1 * m / v**0.5
    expect_close(weight.detach()[1], torch.tensor([-moved, moved]), "the row", ulps=64)
    (state,) = optimizer.state_dict()["state"].values()
    expect_equal(int(state["step"]), count + 1, "count of steps")


@pytest.mark.clause("SPARSE-011")
@pytest.mark.parametrize("rows", [3, 5000])
def test_long_gradients(impl, rows):
    """A gradient of 20,000 rows, with many or few duplicates, acts like its coalesced form."""
    places = arange(20_000) * 7919 % rows
    listed = parameter(20_000, 1, dtype="float64").detach()
    total = zeros(rows, 1, dtype=torch.float64).index_add_(0, places, listed)
    weights = [parameter(rows, 1, dtype="float64") for _ in range(2)]
    optimizers = [impl.SparseAdam([weight], lr=0.1, eps=1e-3) for weight in weights]
    weights[0].grad = torch.sparse_coo_tensor(places[None], listed, (rows, 1), check_invariants=True)
    weights[1].grad = torch.sparse_coo_tensor(arange(rows)[None], total, (rows, 1), check_invariants=True)
    for optimizer in optimizers:
        optimizer.step()
    off = float((weights[0].detach() - weights[1].detach()).abs().max())
    expect(off < 1e-9, "the weights of the coalesced gradient, to 1e-9", f"an error of {off}")


@pytest.mark.clause("SPARSE-041")
def test_rate_of_zero(impl):
    """With a learning rate of 0 weights keep their bits, and the state is updated as usual."""
    weights = [parameter(5, 2) for _ in range(2)]
    optimizers = [impl.SparseAdam([weight], lr=0.1) for weight in weights]
    optimizers[0].param_groups[0]["lr"] = 0.0
    for optimizer, weight in zip(optimizers, weights, strict=True):
        train_sparse(optimizer, [weight], 3)
    expect_bits(weights[0].detach(), parameter(5, 2).detach(), "the weight")
    seen, wanted = (dict(one.state[weight]) for one, weight in zip(optimizers, weights, strict=True))
    expect_unchanged(wanted, seen, "the state")
