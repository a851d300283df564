"""Infinite and NaN gradients, and zero gradients that must not make infinite or NaN weights."""

import pytest

from keyedopt.conformance.suite.support.algorithms import (
    ALGORITHMS,
    fixed_grads,
    make_algorithm,
    need_operators,
    sparse_rows,
    trained_copy,
)
from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_unchanged,
    outcome,
    snapshot,
)
from keyedopt.conformance.suite.support.described import OTHER
from keyedopt.conformance.suite.support.device import ones
from keyedopt.conformance.suite.support.inputs import parameter, set_grads, values

every = pytest.mark.parametrize("algorithm", ALGORITHMS)


@pytest.mark.clause("ALGO-044")
@pytest.mark.needs("{algorithm}", "{algorithm}.by_row")
@every
@pytest.mark.parametrize("bad", ["inf", "-inf", "nan"])
def test_nonfinite_stays_in_its_row(impl, algorithm, bad):
    """A non-finite gradient changes no other row, in its step or later."""
    start, grads = parameter(4, 3), fixed_grads(3)
    plain, _ = trained_copy(impl, algorithm, start, grads)
    grads[0][1, 2] = float(bad)
    spoilt, _ = trained_copy(impl, algorithm, start, grads)
    expect_bits(spoilt.detach()[[0, 2, 3]], plain.detach()[[0, 2, 3]], "the other rows")


@pytest.mark.clause("ALGO-044")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse", "{algorithm}.by_row")
@every
@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_nonfinite_stays_in_its_sparse_row(impl, algorithm, bad):
    """A non-finite sparse gradient changes no other row."""
    start = parameter(4, 3)
    grads = fixed_grads(1, 4)[0]
    plain, _ = trained_copy(impl, algorithm, start, [sparse_rows([3, 1, 3, 0], grads, start)])
    grads[1, 0] = float(bad)
    spoilt, _ = trained_copy(impl, algorithm, start, [sparse_rows([3, 1, 3, 0], grads, start)])
    expect_bits(spoilt.detach()[[0, 2, 3]], plain.detach()[[0, 2, 3]], "the other rows")


@pytest.mark.clause("ALGO-045")
@pytest.mark.needs("{algorithm}", "{algorithm}.by_row")
@every
@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_nonfinite_row(impl, algorithm, bad):
    """Observe what happens to the row, in that step and after later finite gradients."""
    seen = []
    for steps in (1, 3):
        grads = fixed_grads(3)
        grads[0][1, 2] = float(bad)
        weight, _ = trained_copy(impl, algorithm, ones(4, 3), grads[:steps])
        row = weight.detach()[1]
        seen.append("".join("n" if x.isnan() else "i" if x.isinf() else "f" for x in row))
    return seen


@pytest.mark.clause("ALGO-046")
@pytest.mark.needs("{algorithm}.error_if_nonfinite")
@every
@pytest.mark.parametrize("bad", ["inf", "nan"])
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_error_if_nonfinite(impl, algorithm, bad, layout):
    """With error_if_nonfinite the step raises, and no parameter, state or count changes."""
    weights = [parameter(4, 3, seed=index) for index in range(2)]
    groups = [{"params": [weight]} for weight in weights]
    optimizer = make_algorithm(impl, algorithm, groups, error_if_nonfinite=True)
    set_grads(weights)
    optimizer.step()
    before = snapshot([values(weights), optimizer.state_dict()])
    set_grads(weights, seed=2)
    grads = fixed_grads(1, 2)[0]
    grads[1, 1] = float(bad)
    if layout == "sparse":
        weights[1].grad = sparse_rows([3, 1], grads, weights[1])
    else:
        weights[1].grad[:2] = grads
    seen = outcome(optimizer.step)
    expect(seen == "raises RuntimeError", "RuntimeError", seen)
    expect_unchanged(before, [values(weights), optimizer.state_dict()], "weights and state")


@pytest.mark.clause("ALGO-046")
@pytest.mark.needs("{algorithm}.error_if_nonfinite", "{algorithm}.groups")
@every
@pytest.mark.parametrize("strict", [0, 1])
def test_error_if_nonfinite_of_a_group(impl, algorithm, strict):
    """The error_if_nonfinite of a group applies to the gradients of that group."""
    weights = [parameter(4, 3, seed=index) for index in range(2)]
    groups = [
        {"params": [weight], "error_if_nonfinite": index == strict} for index, weight in enumerate(weights)
    ]
    optimizer = make_algorithm(impl, algorithm, groups)
    for index in (1 - strict, strict):
        set_grads(weights)
        weights[index].grad[1, 1] = float("nan")
        seen = outcome(lambda: optimizer.step() and None)
        wanted = "raises RuntimeError" if index == strict else "returns None"
        expect(seen == wanted, f"{wanted} for NaN in group {index}", seen)


@pytest.mark.clause("ALGO-047")
@pytest.mark.needs("{algorithm}.error_if_nonfinite")
@every
def test_error_if_nonfinite_lets_finite_pass(impl, algorithm):
    """error_if_nonfinite does not change the result for finite gradients."""
    start, grads = parameter(4, 3), fixed_grads(3)
    plain, _ = trained_copy(impl, algorithm, start, grads)
    checked, _ = trained_copy(impl, algorithm, start, grads, error_if_nonfinite=True)
    expect_bits(checked.detach(), plain.detach(), "the weight")


@pytest.mark.clause("ALGO-032")
@pytest.mark.needs(OTHER)
def test_zero_is_finite(impl, dtype):
    """Weights of an optimizer with another formula, which may decay them, stay finite."""
    need_operators(impl, OTHER, dtype)
    weights = [parameter(3, 4, dtype=dtype, seed=index) for index in range(2)]
    optimizer = make_algorithm(impl, OTHER, weights)
    for seed in range(3):
        set_grads(weights, seed=seed)
        weights[0].grad.zero_()
        weights[1].grad[1] = 0
        optimizer.step()
    for weight in weights:
        expect(weight.detach().isfinite().all(), "finite weights", weight)


@pytest.mark.clause("ALGO-110")
@pytest.mark.needs("Ftrl.initial_accumulator_value")
def test_zero_with_an_empty_accumulator(impl, dtype):
    """If the accumulator of Ftrl starts at 0, an element without gradients gets a finite weight."""
    weight = parameter(3, 4, dtype=dtype)
    optimizer = impl.Ftrl([weight], lr=0.1, initial_accumulator_value=0.0)
    for seed in range(2):
        set_grads([weight], seed=seed)
        weight.grad[1] = 0
        optimizer.step()
    expect(weight.detach().isfinite().all(), "finite weights", weight)
