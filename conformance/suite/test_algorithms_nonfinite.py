"""Gradients of infinity and NaN."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support import (
    expect,
    expect_bits,
    expect_unchanged,
    outcome,
    parameter,
    set_grads,
    snapshot,
    values,
)

ROW_WISE = ("RowWiseAdagrad", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB", "LarsSGD")
ALGORITHMS = ("SGD", "Adagrad", "Adam", *ROW_WISE)
every = pytest.mark.parametrize("algorithm", ALGORITHMS)
MOMENTUM = {"SGD": {"momentum": 0.9}}


def sparse(rows: Any, grads: Any, like: Any) -> torch.Tensor:
    """Make an uncoalesced sparse gradient from rows and their gradients."""
    values = torch.as_tensor(grads, dtype=like.dtype, device=like.device)
    return torch.sparse_coo_tensor(
        torch.tensor([rows], device=like.device), values, like.shape, check_invariants=True
    )


def trained(impl: Any, algorithm: str, start: Any, grads: Any, **options: Any) -> tuple[Any, Any]:
    """Train a copy of the weight on some gradients; return the weight and the optimizer."""
    weight = torch.nn.Parameter(start.detach().clone())
    given = {**MOMENTUM.get(algorithm, {}), **options}
    optimizer = getattr(impl, algorithm)([weight], lr=0.1, **given)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight, optimizer


def some(steps: int, rows: int = 4, dtype: str = "float32", seed: int = 1) -> list[torch.Tensor]:
    """Make fixed gradients of a table of width 3."""
    return [parameter(rows, 3, dtype=dtype, seed=100 * seed + step).detach() for step in range(steps)]


@pytest.mark.clause("ALGO-044")
@pytest.mark.needs("{algorithm}")
@every
@pytest.mark.parametrize("bad", ["inf", "-inf", "nan"])
def test_nonfinite_stays_in_its_row(impl, algorithm, bad):
    """A gradient that is not finite changes no other row, then or later."""
    start, grads = parameter(4, 3), some(3)
    plain, _ = trained(impl, algorithm, start, grads)
    grads[0][1, 2] = float(bad)
    spoilt, _ = trained(impl, algorithm, start, grads)
    expect_bits(spoilt.detach()[[0, 2, 3]], plain.detach()[[0, 2, 3]], "the other rows")


@pytest.mark.clause("ALGO-044")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@every
@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_nonfinite_stays_in_its_sparse_row(impl, algorithm, bad):
    """A sparse gradient that is not finite changes no other row."""
    start = parameter(4, 3)
    grads = some(1, 4)[0]
    plain, _ = trained(impl, algorithm, start, [sparse([3, 1, 3, 0], grads, start)])
    grads[1, 0] = float(bad)
    spoilt, _ = trained(impl, algorithm, start, [sparse([3, 1, 3, 0], grads, start)])
    expect_bits(spoilt.detach()[[0, 2, 3]], plain.detach()[[0, 2, 3]], "the other rows")


@pytest.mark.clause("ALGO-045")
@pytest.mark.needs("{algorithm}")
@every
@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_nonfinite_row(impl, algorithm, bad):
    """Say what becomes of the row, in that step and after finite ones."""
    seen = []
    for steps in (1, 3):
        grads = some(3)
        grads[0][1, 2] = float(bad)
        weight, _ = trained(impl, algorithm, torch.ones(4, 3), grads[:steps])
        row = weight.detach()[1]
        seen.append("".join("n" if x.isnan() else "i" if x.isinf() else "f" for x in row))
    return seen


@pytest.mark.clause("ALGO-046")
@pytest.mark.needs("{algorithm}.error_if_nonfinite")
@every
@pytest.mark.parametrize("bad", ["inf", "nan"])
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_error_if_nonfinite(impl, algorithm, bad, layout):
    """error_if_nonfinite refuses the step, and no parameter, state or count changes."""
    weights = [parameter(4, 3, seed=index) for index in range(2)]
    groups = [{"params": [weight]} for weight in weights]
    options = MOMENTUM.get(algorithm, {})
    optimizer = getattr(impl, algorithm)(groups, lr=0.1, error_if_nonfinite=True, **options)
    set_grads(weights)
    optimizer.step()
    before = snapshot([values(weights), optimizer.state_dict()])
    set_grads(weights, seed=2)
    grads = some(1, 2)[0]
    grads[1, 1] = float(bad)
    if layout == "sparse":
        weights[1].grad = sparse([3, 1], grads, weights[1])
    else:
        weights[1].grad[:2] = grads
    seen = outcome(optimizer.step)
    expect(seen == "raises RuntimeError", "RuntimeError", seen)
    expect_unchanged(before, [values(weights), optimizer.state_dict()], "weights and state")


@pytest.mark.clause("ALGO-047")
@pytest.mark.needs("{algorithm}.error_if_nonfinite")
@every
def test_error_if_nonfinite_lets_finite_pass(impl, algorithm):
    """error_if_nonfinite changes nothing for finite gradients."""
    start, grads = parameter(4, 3), some(3)
    plain, _ = trained(impl, algorithm, start, grads)
    checked, _ = trained(impl, algorithm, start, grads, error_if_nonfinite=True)
    expect_bits(checked.detach(), plain.detach(), "the weight")
