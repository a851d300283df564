"""Gradients of every kind: missing, zero, sparse, permuted, scaled, and with any memory layout."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.algorithms import (
    ALGORITHMS,
    WITH_EPS,
    WITH_OTHER,
    decay,
    expect_same_way,
    fixed_grads,
    make_algorithm,
    need_dtype,
    sparse_rows,
    trained_copy,
)
from keyedopt.conformance.suite.support.assertions import (
    error_budget,
    expect,
    expect_bits,
    expect_close,
    expect_unchanged,
    expect_within,
    same_bits,
    snapshot,
    ulp_errors,
    worst_of_orders,
)
from keyedopt.conformance.suite.support.described import documented_state, entries_of
from keyedopt.conformance.suite.support.device import arange, tensor, zeros
from keyedopt.conformance.suite.support.draws import DRAWS
from keyedopt.conformance.suite.support.inputs import parameter, set_grads, set_wide_grads, values, wide
from keyedopt.conformance.suite.support.measured import Measuring, note_error, note_median
from keyedopt.conformance.suite.support.options import ADAMS

#: Options without decay, of the algorithm that decays by default.
NO_DECAY = {"AdamW": {"weight_decay": 0.0}}
every = pytest.mark.parametrize("algorithm", ALGORITHMS)
any_optimizer = pytest.mark.parametrize("algorithm", WITH_OTHER)


def state_of(optimizer: Any, weight: Any) -> dict[str, torch.Tensor]:
    """Return the state that has one entry per row."""
    state = entries_of(optimizer, weight).items()
    tensors = {name: value for name, value in state if isinstance(value, torch.Tensor) and value.dim()}
    return {name: value for name, value in tensors.items() if len(value) == len(weight)}


# --- missing and zero -----------------------------------------------------------------------------


@pytest.mark.clause("ALGO-031")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_missing(impl, algorithm):
    """A parameter without a gradient keeps its weight and state, and the others are stepped."""
    weights = [parameter(4, 3, seed=index) for index in range(2)]
    optimizer = make_algorithm(impl, algorithm, weights, **decay(impl, algorithm, 0.1))
    set_grads(weights)
    optimizer.step()
    before = snapshot([weights[0], entries_of(optimizer, weights[0], {})])
    moved = weights[1].detach().clone()
    weights[0].grad = None
    set_grads(weights[1:], seed=1)
    optimizer.step()
    expect_unchanged(before, [weights[0].detach(), entries_of(optimizer, weights[0], {})], "weight and state")
    expect(not same_bits(moved, weights[1].detach()), "the other parameter stepped", "no change")


@pytest.mark.clause("ALGO-032")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "Ftrl"])
def test_zero(impl, algorithm, dtype):
    """A row whose gradients are all zero keeps its bits from the first step on."""
    weight = parameter(3, 4, dtype=dtype)
    before = values([weight])[0]
    optimizer = make_algorithm(impl, algorithm, [weight], **NO_DECAY.get(algorithm, {}))
    for seed in range(3):
        set_grads([weight], seed=seed)
        weight.grad[1] = 0
        optimizer.step()
    expect_bits(weight.detach()[1], before[1], "the row without gradient")
    expect(weight.detach().isfinite().all(), "finite weights", weight)


@pytest.mark.clause("ALGO-033")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", WITH_EPS)
def test_zero_without_eps(impl, algorithm):
    """With eps = 0 a row with zero gradients keeps its bits, or eps = 0 raises an error."""
    weight = parameter(3, 4)
    before = values([weight])[0]
    try:
        optimizer = getattr(impl, algorithm)([weight], lr=0.1, eps=0.0, **NO_DECAY.get(algorithm, {}))
    except ValueError:
        return
    set_grads([weight])
    weight.grad[1] = 0
    optimizer.step()
    expect(weight.detach().isfinite().all(), "finite weights, or a ValueError for eps=0", weight)
    expect_bits(weight.detach()[1], before[1], "the row without gradient")


# --- laws -----------------------------------------------------------------------------------------


@pytest.mark.clause("ALGO-034")
@pytest.mark.needs("{algorithm}")
@every
def test_permuted_rows(impl, algorithm):
    """Permuting the rows permutes the result."""
    order = tensor([2, 0, 3, 1])
    start, grads = parameter(4, 3), fixed_grads(3)
    plain, _ = trained_copy(impl, algorithm, start, grads, weight_decay=0.01)
    permuted, _ = trained_copy(
        impl, algorithm, start[order], [grad[order] for grad in grads], weight_decay=0.01
    )
    expect_same_way(permuted, plain[order], start[order], "the permuted table", algorithm)


@pytest.mark.clause("ALGO-035")
@pytest.mark.needs("{algorithm}", "{algorithm}.by_row")
@every
def test_split_table(impl, algorithm):
    """The two halves of a table, trained separately, give the same result as the whole table."""
    start, grads = parameter(4, 3), fixed_grads(3)
    whole, _ = trained_copy(impl, algorithm, start, grads, weight_decay=0.01)
    for half in (slice(0, 2), slice(2, 4)):
        part, _ = trained_copy(
            impl, algorithm, start[half], [grad[half] for grad in grads], weight_decay=0.01
        )
        expect_same_way(part, whole[half], start[half], f"rows {half.start} to {half.stop}", algorithm)


@pytest.mark.clause("ALGO-035")
@pytest.mark.needs("{algorithm}", "{algorithm}.by_row")
@every
def test_row_of_its_own(impl, algorithm, dtype):
    """A row of a large table gives the same result as a table with only this row."""
    start, grads = parameter(50, 3, dtype=dtype).detach(), fixed_grads(3, 50, dtype)
    whole, _ = trained_copy(impl, algorithm, start, grads)
    for row in (0, 25, 49):
        part = slice(row, row + 1)
        alone, _ = trained_copy(impl, algorithm, start[part], [grad[part] for grad in grads])
        expect_same_way(alone, whole[part], start[part], f"row {row} in a table of its own", algorithm)


@pytest.mark.clause("ALGO-042")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", [*WITH_EPS, "LarsSGD"])
@pytest.mark.parametrize("power", [-12, 12])
def test_scaled_gradients(impl, algorithm, power):
    """Gradients scaled by a power of two lead to the same weights."""
    need_dtype(impl, algorithm, "float64")  # for the eps
    start, grads = parameter(4, 3, dtype="float64"), fixed_grads(4, dtype="float64")
    options = {} if algorithm == "LarsSGD" else {"eps": 1e-200}
    plain, _ = trained_copy(impl, algorithm, start, grads, **options)
    scaled, _ = trained_copy(impl, algorithm, start, [grad * 2.0**power for grad in grads], **options)
    expect_close(scaled.detach(), plain.detach(), f"weights of gradients times 2^{power}", ulps=64)


@pytest.mark.clause("ALGO-042")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", ADAMS)
def test_scaled_gradients_in_half(impl, algorithm, dtype):
    """Gradients whose squares underflow float16, but whose running means do not, lead to the same weights."""
    start, grads = parameter(4, 3, dtype=dtype), fixed_grads(3, dtype=dtype)
    plain, _ = trained_copy(impl, algorithm, start, [grad * 2.0**3 for grad in grads], eps=1e-200)
    scaled, _ = trained_copy(impl, algorithm, start, [grad * 2.0**9 for grad in grads], eps=1e-200)
    expect_same_way(scaled, plain, start, "the weight", algorithm)


@pytest.mark.clause("ALGO-027")
@pytest.mark.needs("{algorithm}", "{algorithm}.by_row")
@pytest.mark.parametrize("algorithm", ["LAMB", "PartialRowWiseLAMB", "LarsSGD"])
def test_extreme_rows(impl, algorithm):
    """A row whose squares underflow or overflow float32 gives the same result as one of another scale."""
    scale = tensor([[1.0], [2.0**-80], [2.0**80], [1.0]])
    start, grads = -parameter(4, 3).detach().abs(), fixed_grads(3)
    plain, _ = trained_copy(impl, algorithm, start, grads)
    scaled, _ = trained_copy(impl, algorithm, start * scale, grads)
    expect_same_way(scaled / scale, plain, start, "the weight, by its scale,", algorithm)
    if algorithm == "LarsSGD":  # the others have Adam's squares in their state
        same, _ = trained_copy(impl, algorithm, start, [grad * scale for grad in grads])
        expect_same_way(same, plain, start, "the weight for gradients of another scale", algorithm)


# --- sparse gradients -----------------------------------------------------------------------------


@pytest.mark.clause("ALGO-036")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@every
def test_untouched_rows(impl, algorithm):
    """Rows that a sparse gradient does not list keep weight and state."""
    start = parameter(4, 3)
    plain = {"momentum": 0.0} if algorithm == "SGD" else {}  # torch's momentum moves every row
    weight, optimizer = trained_copy(impl, algorithm, start, fixed_grads(2), **plain)
    before = snapshot([weight, state_of(optimizer, weight)])
    weight.grad = sparse_rows([3, 1, 3], fixed_grads(1, 3)[0], weight)
    optimizer.step()
    for row in (0, 2):
        expect_bits(weight.detach()[row], before[0][row], f"weight of row {row}")
        for name, value in state_of(optimizer, weight).items():
            expect_bits(value[row], before[1][name][row], f"{name} of row {row}")


@pytest.mark.clause("ALGO-037")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@every
def test_coalesced(impl, algorithm):
    """Coalescing a sparse gradient before the step does not change the result."""
    start = parameter(4, 3)
    grads = [sparse_rows([3, 1, 3, 3], grad, start) for grad in fixed_grads(3)]
    plain, _ = trained_copy(impl, algorithm, start, grads)
    coalesced, _ = trained_copy(impl, algorithm, start, [grad.coalesce() for grad in grads])
    expect_same_way(coalesced, plain, start, "the weight", algorithm)


@pytest.mark.clause("ALGO-038")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@every
def test_all_rows_listed(impl, algorithm):
    """A sparse gradient that lists every row gives the same result as the dense gradient."""
    start, grads = parameter(4, 3), fixed_grads(3)
    dense, _ = trained_copy(impl, algorithm, start, grads)
    order = [2, 0, 3, 1]
    listed, _ = trained_copy(
        impl, algorithm, start, [sparse_rows(order, grad[order], start) for grad in grads]
    )
    expect_same_way(listed, dense, start, "the weight", algorithm)


@pytest.mark.clause("ALGO-038")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse", "{algorithm}.weight_decay")
@every
def test_all_rows_listed_with_decay(impl, algorithm):
    """With weight decay too it gives the same result as the dense gradient, or is refused."""
    start, grads = parameter(4, 3), fixed_grads(3)
    dense, _ = trained_copy(impl, algorithm, start, grads, weight_decay=0.25)
    listed = [sparse_rows([2, 0, 3, 1], grad[[2, 0, 3, 1]], start) for grad in grads]
    try:
        seen, _ = trained_copy(impl, algorithm, start, listed, weight_decay=0.25)
    except (RuntimeError, ValueError, NotImplementedError):
        return
    expect_same_way(seen, dense, start, "the weight", algorithm)


@pytest.mark.clause("ALGO-039")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@every
def test_no_row_listed(impl, algorithm):
    """A sparse gradient that lists no row changes no weight, before and after other gradients."""
    plain = {"momentum": 0.0} if algorithm == "SGD" else {}
    weight, optimizer = trained_copy(impl, algorithm, parameter(4, 3), [], **plain)
    for _ in range(2):
        before = values([weight])[0]
        weight.grad = sparse_rows([], zeros(0, 3), weight)
        optimizer.step()
        expect_bits(weight.detach(), before, "the weight")
        weight.grad = sparse_rows([1], fixed_grads(1, 1)[0], weight)
        optimizer.step()


@pytest.mark.clause("ALGO-040")
@pytest.mark.needs("{algorithm}.rows")
@every
def test_nonzero_rows(impl, algorithm, dtype):
    """With rows='nonzero' a dense gradient acts like the sparse gradient of its nonzero rows."""
    start, grads = parameter(4, 3, dtype=dtype), fixed_grads(3, dtype=dtype)
    for grad in grads:
        grad[[0, 2]] = 0
        grad[1, :2] = 0  # which leaves one element
        grad[3] = torch.stack([grad[3, 0], -grad[3, 0], grad[0, 0]])  # elements that add up to 0
    nonzero, _ = trained_copy(impl, algorithm, start, grads, rows="nonzero", weight_decay=0.1)
    listed = [sparse_rows([1, 3], grad[[1, 3]], start) for grad in grads]
    touched, _ = trained_copy(impl, algorithm, start, listed, weight_decay=0.1)
    expect_bits(nonzero.detach()[[0, 2]], start.detach()[[0, 2]], "the rows without gradient")
    expect_same_way(nonzero, touched, start, "the weight", algorithm)


@pytest.mark.clause("ALGO-040")
@pytest.mark.needs("{algorithm}.rows")
@every
def test_all_rows(impl, algorithm):
    """With rows='all' a sparse gradient acts like the dense one, including decay and momentum."""
    start, grads = parameter(4, 3), fixed_grads(3)
    for grad in grads:
        grad[[0, 2]] = 0
    dense, _ = trained_copy(impl, algorithm, start, grads, weight_decay=0.1)
    listed = [sparse_rows([3, 1], grad[[3, 1]], start) for grad in grads]
    spread, _ = trained_copy(impl, algorithm, start, listed, rows="all", weight_decay=0.1)
    expect_same_way(spread, dense, start, "the weight", algorithm)


@pytest.mark.clause("ALGO-043")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@pytest.mark.parametrize("algorithm", ["SGD", "Adagrad", "RowWiseAdagrad"])
def test_many_duplicates(impl, algorithm):
    """The sum of ten thousand gradients of one row is as precise as in any order; others are recorded."""
    with Measuring({"errors": []}) as measuring:
        for count in (10, 100, 1000, 10_000):
            _sum_duplicates(impl, algorithm, count, measuring)
        errors = torch.stack([_errors_of_draws(impl, algorithm, count) for count in (3, 10, 100)])
        note_median(measuring, errors.amax(dim=0), quantity="sum", dtype="float32")
    return measuring.record


def sums_of(impl: Any, algorithm: str, optimizer: Any, weight: Any) -> torch.Tensor:
    """Return the sums of squares in the state."""
    sums: torch.Tensor = documented_state(impl, algorithm, entries_of(optimizer, weight))["sum"]
    return sums


def _errors_of_draws(impl: Any, algorithm: str, count: int) -> torch.Tensor:
    """Take one step with `count` gradients for each row; return the largest error of each row's sum."""
    weight = torch.nn.Parameter(zeros(DRAWS, 3))
    grads = parameter(count * DRAWS, 3, seed=count).detach().abs()
    exact = grads.double().reshape(count, DRAWS, 3).sum(dim=0)
    optimizer = getattr(impl, algorithm)([weight], lr=1.0)
    weight.grad = sparse_rows(list(range(DRAWS)) * count, grads, weight)
    optimizer.step()
    if algorithm == "SGD":
        return ulp_errors(-weight.detach(), exact).amax(dim=1)
    squares = exact.square() if algorithm == "Adagrad" else exact.square().mean(dim=1, keepdim=True)
    return ulp_errors(sums_of(impl, algorithm, optimizer, weight).reshape(DRAWS, -1), squares).amax(dim=1)


def _sum_duplicates(impl: Any, algorithm: str, count: int, measuring: Measuring) -> None:
    """Take one step with `count` gradients of one row, and measure the error of their sum."""
    grads = parameter(count, 3, seed=5).detach().abs()
    exact = grads.double().sum(dim=0)

    def summed(generator: torch.Generator) -> torch.Tensor:
        order = torch.randperm(count, generator=generator)
        columns = arange(3).repeat(count)
        return zeros(3).scatter_add_(0, columns, grads[order].reshape(-1))  # one by one

    weight = torch.nn.Parameter(zeros(2, 3))
    optimizer = getattr(impl, algorithm)([weight], lr=1.0)
    weight.grad = sparse_rows([1] * count, grads, weight)
    optimizer.step()
    if algorithm == "SGD":
        seen, wanted = -weight.detach()[1], exact
    else:
        sums = exact.square() if algorithm == "Adagrad" else exact.square().mean().reshape(1)
        seen, wanted = sums_of(impl, algorithm, optimizer, weight)[1], sums
    # Of the square, at most, where it is a sum of squares.
    budget = error_budget(worst_of_orders(summed, exact)) * (1 if algorithm == "SGD" else 4)
    note_error(measuring, seen, wanted, budget, quantity="sum", dtype="float32", rows=count)
    if count == 10_000:
        expect_within(seen, wanted, budget, "the sum of duplicates")


# --- layouts and surroundings of the gradient -----------------------------------------------------


@pytest.mark.clause("ALGO-041")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_dense_gradient_is_left_with_decay(impl, algorithm):
    """A step with weight decay does not modify a dense gradient."""
    expect_dense_gradient_left(impl, algorithm)


@pytest.mark.clause("ALGO-041")
@pytest.mark.needs("{algorithm}", "{algorithm}.maximize")
@any_optimizer
def test_dense_gradient_is_left(impl, algorithm):
    """A step with weight decay and maximize does not modify a dense gradient."""
    expect_dense_gradient_left(impl, algorithm, maximize=True)


def expect_dense_gradient_left(impl: Any, algorithm: str, **options: Any) -> None:
    """Expect two steps to leave their gradients as they are."""
    weight: Any = parameter(4, 3)
    optimizer = make_algorithm(impl, algorithm, [weight], weight_decay=0.1, **options)
    for seed in range(2):
        set_wide_grads([weight], seed=seed)
        before = weight.grad.clone()
        optimizer.step()
        expect_bits(weight.grad, before, "the gradient")


@pytest.mark.clause("ALGO-041")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@every
def test_sparse_gradient_is_left(impl, algorithm):
    """A step does not modify a sparse gradient."""
    weight = parameter(4, 3)
    optimizer = make_algorithm(impl, algorithm, [weight])
    for step in range(2):
        grads = fixed_grads(1, 3, seed=step)[0]
        weight.grad = sparse_rows([3, 1, 3], grads * wide(3).to(grads), weight)
        before = weight.grad.clone()
        optimizer.step()
        expect_bits(weight.grad, before, "the gradient")


@pytest.mark.clause("ALGO-048")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_not_contiguous(impl, algorithm):
    """A weight that is a view, and a transposed gradient, give the same result as contiguous tensors."""
    start, grads = parameter(4, 3), fixed_grads(3)
    plain, _ = trained_copy(impl, algorithm, start, grads)
    buffer = zeros(3, 8)
    view = torch.nn.Parameter(buffer[:, ::2].t())
    with torch.no_grad():
        view.copy_(start)
    optimizer = make_algorithm(impl, algorithm, [view])
    for grad in grads:
        view.grad = grad.t().contiguous().t()
        optimizer.step()
    expect_same_way(view, plain, start, "the weight", algorithm)
    expect(not buffer[:, 1::2].any(), "what lies between the elements unchanged", buffer)
