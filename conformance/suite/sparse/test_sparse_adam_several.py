"""SparseAdam with several parameters that differ, invalid second entries, strides, and version counters."""

import warnings
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.algorithms import expect_same_way
from keyedopt.conformance.suite.support.assertions import (
    error_of,
    expect_bits,
    expect_close,
    expect_raises,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.device import ones, tensor, zeros
from keyedopt.conformance.suite.support.inputs import moments, parameter, set_sparse_grad, train_sparse

SHAPES = ((5, 2), (300, 17), (1, 1), (5, 2))
#: Which parameters have a gradient in each step.
PRESENT = ((0,), (0, 1), (0, 1, 2), (0, 2, 3), (0, 1, 2, 3))


def tables() -> list[Any]:
    """Make tables that differ, from one element to more than a block."""
    return [parameter(*shape, seed=at) for at, shape in enumerate(SHAPES)]


def give(weights: list[Any], step: int, empty: bool = False) -> None:
    """Give gradients to the parameters of a step; all others have none, or if `empty` one without rows."""
    for at, weight in enumerate(weights):
        weight.grad = torch.zeros_like(weight).to_sparse(1) if empty else None
        if at in PRESENT[step]:
            set_sparse_grad(weight, [len(weight) - 1, 0, len(weight) - 1], seed=10 * step + at + 1)


def elements(grad: Any) -> torch.Tensor:
    """Return a gradient whose every element is sparse."""
    found: torch.Tensor = grad.to_dense().to_sparse()
    return found


@pytest.mark.clause("SPARSE-031")
def test_parameters_with_unlike_step_counts(impl: Any) -> None:
    """Parameters of a group that were updated unequally often train like each one by itself."""
    for empty in (False, True):
        together, apart = tables(), tables()
        one = impl.SparseAdam(together, lr=0.25)
        others = [impl.SparseAdam([weight], lr=0.25) for weight in apart]
        for step in range(len(PRESENT)):
            give(together, step, empty)
            give(apart, step, empty)
            for optimizer in (one, *others):
                optimizer.step()
        for seen, wanted, start in zip(together, apart, tables(), strict=True):
            expect_same_way(seen, wanted, start, "a parameter among others", steps=len(PRESENT))


@pytest.mark.clause("SPARSE-025")
def test_parameter_listed_twice_with_another_between(impl: Any) -> None:
    """A parameter that is listed again after another one raises an error, or is updated once per step."""
    weight, other, alone = parameter(5, 2), parameter(5, 2, seed=1), parameter(5, 2)
    single = impl.SparseAdam([alone], lr=0.25)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if error_of(lambda: impl.SparseAdam([weight, other, weight], lr=0.25)):
            return
        optimizer = impl.SparseAdam([weight, other, weight], lr=0.25)
    for step in range(2):
        for one in (weight, other, alone):
            set_sparse_grad(one, [1, 3], seed=step + 1)
        single.step()
        optimizer.step()
    expect_bits(weight.detach(), alone.detach(), "a parameter listed twice, after two steps,")


def misplaced(where: str) -> torch.Tensor:
    """Make a gradient of a (5, 2) table with one index out of range."""
    indices = {"row": [[1, 7]], "column": [[1, 1], [0, 7]], "both": [[1, 7], [1, 7]]}[where]
    values = ones(2, 2) if where == "row" else ones(2)
    return torch.sparse_coo_tensor(tensor(indices), values, (5, 2), check_invariants=False)


@pytest.mark.clause("SPARSE-032", "SPARSE-033")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("where", ["row", "column", "both"])
def test_invalid_indices_of_the_second_parameter(impl: Any, where: str, groups: int) -> None:
    """An index out of range, in any sparse dimension of the second gradient, changes no parameter."""
    weights = [parameter(5, 2), parameter(5, 2, seed=1)]
    given = weights if groups == 1 else [{"params": [weight]} for weight in weights]
    optimizer = impl.SparseAdam(given, lr=0.25)
    train_sparse(optimizer, weights, 2)
    live = [weights, [dict(optimizer.state[weight]) for weight in weights]]
    before = snapshot(live)
    set_sparse_grad(weights[0], [1, 3])
    weights[1].grad = misplaced(where)
    expect_raises(optimizer.step, Exception, expected="an error for index 7")
    after = [weights, [dict(optimizer.state[weight]) for weight in weights]]
    expect_unchanged(before, after, "the optimizer after a failed step")


@pytest.mark.clause("SPARSE-015")
@pytest.mark.parametrize("kind", ["rows", "elements"])
def test_strided_parameters_over_several_steps(impl: Any, kind: str) -> None:
    """A parameter with gaps between its elements trains like a contiguous one, moments included."""
    plain = parameter(6, 4)
    buffer = zeros(6, 8)
    strided = torch.nn.Parameter(buffer[:, ::2])
    with torch.no_grad():
        strided.copy_(plain)
    optimizers = [impl.SparseAdam([weight], lr=0.25) for weight in (plain, strided)]
    for step in range(3):
        for weight in (plain, strided):
            set_sparse_grad(weight, [step, 5, step], seed=step + 1)
            if kind == "elements":
                weight.grad = elements(weight.grad)
        for optimizer in optimizers:
            optimizer.step()
    expect_same_way(strided, plain, parameter(6, 4), "the strided parameter")
    expect_unchanged(torch.zeros(6, 4), buffer[:, 1::2].cpu(), "what lies between the elements")


@pytest.mark.clause("SPARSE-084")
@pytest.mark.parametrize("kind", ["plain", "strided", "elements"])
def test_versions(impl: Any, kind: str) -> None:
    """A graph that saved a parameter or its moments before a step raises in its backward pass."""
    weights = [parameter(5, 2), parameter(5, 2, seed=1)]
    if kind == "strided":
        weights[1] = torch.nn.Parameter(zeros(5, 4)[:, ::2])
    optimizer = impl.SparseAdam(weights, lr=0.25)
    train_sparse(optimizer, weights, 1)
    graphs = []
    for weight in weights:
        graphs.append((weight * weight).sum())
        graphs += [(ones(1, requires_grad=True) * one).sum() for one in moments(optimizer, weight).values()]
        set_sparse_grad(weight, [1, 3, 1])
        if kind == "elements":
            weight.grad = elements(weight.grad)
    optimizer.step()
    for graph in graphs:
        expect_raises(graph.backward, RuntimeError, expected="RuntimeError: a saved tensor was modified")


@pytest.mark.clause("SPARSE-015")
@pytest.mark.needs("SparseAdam", "SparseAdam.any_shape")
def test_a_row_of_several_sparse_dimensions(impl: Any) -> None:
    """A gradient may have several sparse dimensions before dense ones; the other rows keep bits."""
    gradient = tensor([[[0.0, 0.0], [3.0, -2.0]], [[0.0, 0.0], [0.0, 0.0]]])
    weight = torch.nn.Parameter(torch.ones_like(gradient))
    weight.grad = gradient.to_sparse(2)
    impl.SparseAdam([weight], lr=0.25).step()
    expect_close(weight.detach(), 1 - 0.25 * gradient.sign(), "the parameter after a first step", ulps=64)
