"""Sizes: wide rows, long gradients, large parameters, many parameters, and empty ones among others."""

import pytest
import torch

from keyedopt.conformance.suite.support.algorithms import (
    ALGORITHMS,
    ROW_WISE,
    WITH_OTHER,
    expect_same_way,
    fixed_grads,
    make_algorithm,
    need_dtype,
    need_independent,
    trained_copy,
    variant_of,
)
from keyedopt.conformance.suite.support.assertions import expect, expect_close
from keyedopt.conformance.suite.support.described import documented_state, entries_of
from keyedopt.conformance.suite.support.device import arange, zeros
from keyedopt.conformance.suite.support.inputs import INTERPRETED, parameter

every = pytest.mark.parametrize("algorithm", ALGORITHMS)
any_optimizer = pytest.mark.parametrize("algorithm", WITH_OTHER)

#: More than kernels for many tensors take at a time, in elements and in tensors; Triton's interpreter has no
#: time for so many.
BLOCKS = (3, 5) if INTERPRETED else (50, 110)
MANY = 3 if INTERPRETED else 130


@pytest.mark.clause("ALGO-095")
@pytest.mark.needs("{algorithm}", "{algorithm}.by_row")
@pytest.mark.parametrize("algorithm", ROW_WISE)
@pytest.mark.parametrize("width", [1, 3, 257, 2053])
def test_width(impl, algorithm, width):
    """The mean square and the norms of a row include the whole row."""
    weight = parameter(2, width, seed=3)
    before = weight.detach().double()
    optimizer = make_algorithm(impl, algorithm, [weight])
    weight.grad = parameter(2, width, seed=4).detach()
    weight.grad[:, -1] = 8.0
    square = weight.grad.double().square().mean(dim=1)
    if "sum" in variant_of(impl, algorithm):
        square *= width
    optimizer.step()
    # A sum of n positive terms in any order is off by n - 1 roundings at most, each of u = 2^-24 of the sum.
    # There are few other operations. A weight is rounded by u, which is u / part of the step.
    if algorithm in ("LAMB", "PartialRowWiseLAMB", "LarsSGD"):
        part = 0.1 * (1e-3 if algorithm == "LarsSGD" else 1.0)
        moved = (weight.detach().double() - before).norm(dim=1) / before.norm(dim=1)
        off = float((moved / part - 1).abs().max())
        expect(off < (width + 8 + 1 / part) * 2**-24, f"rows moved by {part} of their norm", moved.tolist())
    state = documented_state(impl, algorithm, entries_of(optimizer, weight))
    if algorithm == "RowWiseAdagrad":
        expect_close(state["sum"].reshape(-1), square, "sum", ulps=width + 3)
    elif algorithm.startswith("Partial"):
        expect_close(state["exp_avg_sq"].reshape(-1), 0.001 * square, "exp_avg_sq", ulps=width + 3)


@pytest.mark.clause("ALGO-095")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@every
@pytest.mark.parametrize("rows", [3, 5000])
def test_long_sparse_gradients(impl, algorithm, rows):
    """A gradient of 70,000 rows, with many or few duplicates, acts like its coalesced form."""
    need_dtype(impl, algorithm, "float64")
    places = arange(70_000) * 7919 % rows
    listed = parameter(70_000, 1, dtype="float64").detach()
    total = zeros(rows, 1, dtype=torch.float64).index_add_(0, places, listed)
    start = parameter(rows, 1, dtype="float64")
    options = {"momentum": 0.0} if algorithm == "SGD" else {}
    long = torch.sparse_coo_tensor(places[None], listed, (rows, 1), check_invariants=True)
    short = torch.sparse_coo_tensor(arange(rows)[None], total, (rows, 1), check_invariants=True)
    seen, wanted = (trained_copy(impl, algorithm, start, [grad], **options)[0] for grad in (long, short))
    off = float((seen.detach() - wanted.detach()).abs().max())
    # Each of two sums of n terms is off by n - 1 roundings at most, each of half of eps of the largest sum. A
    # step is off by as much times its learning rate, divided by the gradient where it is divided by its root.
    largest = zeros(rows, 1, dtype=torch.float64).index_add_(0, places, listed.abs()).max()
    error = (len(listed) // rows + 1) * torch.finfo(torch.float64).eps * largest
    most = float(0.1 * error / total.abs().min().clamp(max=1)) + 1e-15
    expect(off < most, f"the weights of the coalesced gradient, to {most:.1e}", f"an error of {off:.1e}")


@pytest.mark.clause("ALGO-095")
@pytest.mark.needs("{algorithm}", "{algorithm}.by_row")
@every
def test_large(impl, algorithm, dtype):
    """Each block of a large parameter gives the same result as a parameter that is only this block."""
    start, grads = parameter(4, 3, dtype=dtype), fixed_grads(2, dtype=dtype)
    small, _ = trained_copy(impl, algorithm, start, grads)
    whole, wanted, *long = (one.detach().repeat(BLOCKS) for one in (start, small, *grads))
    large, _ = trained_copy(impl, algorithm, whole, long)
    expect_same_way(large, wanted, whole, "the weight", algorithm, steps=2)


@pytest.mark.clause("ALGO-095")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_many(impl, algorithm):
    """Each of many parameters in a group gives the same result as a single parameter."""
    need_independent(impl, algorithm)
    start, grads = parameter(4, 3), fixed_grads(2)
    alone, _ = trained_copy(impl, algorithm, start, grads)
    weights = [torch.nn.Parameter(start.detach().clone()) for _ in range(MANY)]
    optimizer = make_algorithm(impl, algorithm, weights)
    for grad in grads:
        for weight in weights:
            weight.grad = grad.clone()
        optimizer.step()
    seen, wanted = torch.cat(weights), torch.cat([alone] * MANY)
    expect_same_way(seen, wanted, start.repeat(MANY, 1), "the weights", algorithm, steps=2)


@pytest.mark.clause("ALGO-049")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_no_rows(impl, algorithm):
    """Tables without rows, at any position, raise no error and do not affect other tables."""
    need_independent(impl, algorithm)
    start, grads = parameter(4, 3), fixed_grads(2)
    alone, _ = trained_copy(impl, algorithm, start, grads)
    weights = [torch.nn.Parameter(start.detach()[:rows].clone()) for rows in (0, 4, 0, 4, 0)]
    optimizer = make_algorithm(impl, algorithm, weights)
    for grad in grads:
        for weight in weights:
            weight.grad = grad[: len(weight)].clone()
        optimizer.step()
    for weight in weights[1::2]:
        expect_same_way(weight, alone, start, "the weight of a table with rows", algorithm, steps=2)
