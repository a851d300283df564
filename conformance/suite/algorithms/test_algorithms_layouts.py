"""Layouts of weights and gradients, with each option."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.algorithms import (
    ALGORITHMS,
    expect_same_way,
    fixed_grads,
    make_algorithm,
    sparse_rows,
)
from keyedopt.conformance.suite.support.assertions import Mismatch, exactly, expect_bits
from keyedopt.conformance.suite.support.inputs import _numbers, layouts, parameter
from keyedopt.conformance.suite.support.options import OTHER_OPTIONS, TWO, with_required_options

every = pytest.mark.parametrize("algorithm", ALGORITHMS)
#: What a case with an option does.
Check = Callable[[dict[str, Any]], None]


def with_each_option(impl: Any, algorithm: str, check: Check, decay: bool = True) -> None:
    """Check each option of the algorithm that the target has; an error says which option it is about."""
    for option in OTHER_OPTIONS[algorithm].split():
        if impl.lacks(f"{algorithm}.{option}"):
            continue
        for value in (TWO[option][1], *(["all"] if option == "rows" else [])):
            given = with_required_options(option, value)
            if not decay or impl.lacks(f"{algorithm}.weight_decay"):
                del given["weight_decay"]
            try:
                check(given)
            except Mismatch as error:
                error.add(f"with {option}={value!r}")
                raise


def trained(impl: Any, algorithm: str, weight: torch.Tensor, grads: Sequence[Any], **options: Any) -> Any:
    """Train a parameter that has the memory of a weight."""
    param = torch.nn.Parameter(weight.detach())
    optimizer = make_algorithm(impl, algorithm, [param], **options)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param


@pytest.mark.clause("ALGO-038")
@pytest.mark.plain_only("it makes an optimizer for each option")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@every
def test_all_rows_listed_with_each_option(impl, algorithm):
    """With each option too, a gradient that lists every row gives the same result as the dense one."""
    start, grads, order = parameter(4, 3).detach(), fixed_grads(3), [2, 0, 3, 1]

    def check(options: dict[str, Any]) -> None:
        dense = trained(impl, algorithm, start.clone(), grads, **options)
        listed = [sparse_rows(order, grad[order], start) for grad in grads]
        seen = trained(impl, algorithm, start.clone(), listed, **options)
        expect_same_way(seen, dense, start, "the weight", algorithm)

    with_each_option(impl, algorithm, check, decay=False)


def expect_layouts(impl: Any, algorithm: str, grads: Sequence[torch.Tensor], decay: bool) -> None:
    """Expect weights of each layout to train like a contiguous one, with each option."""
    start = parameter(4, 3).detach()

    def check(options: dict[str, Any]) -> None:
        plain = trained(impl, algorithm, start.clone(), grads, **options)
        for name, weight in layouts(start):
            seen = trained(impl, algorithm, weight, grads, **options)
            expect_same_way(seen, plain, start, f"{name} weight", algorithm)

    with_each_option(impl, algorithm, check, decay)


@pytest.mark.clause("ALGO-048")
@pytest.mark.plain_only("it makes an optimizer for each option")
@pytest.mark.needs("{algorithm}")
@every
def test_layouts_with_each_option(impl, algorithm):
    """With each option, a weight that is not contiguous trains like a contiguous one."""
    expect_layouts(impl, algorithm, fixed_grads(3), decay=True)


@pytest.mark.clause("ALGO-048")
@pytest.mark.plain_only("it makes an optimizer for each option")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@every
def test_layouts_with_each_option_and_sparse_gradients(impl, algorithm):
    """The same holds for sparse gradients that list some rows, in any order and repeatedly."""
    like, listed = parameter(4, 3).detach(), ([3, 1, 3], [1, 1, 2], [3, 0])
    grads = [sparse_rows(rows, _numbers((len(rows), 3), seed), like) for seed, rows in enumerate(listed)]
    expect_layouts(impl, algorithm, grads, decay=False)


def expect_left(
    impl: Any, algorithm: str, start: torch.Tensor, grad: torch.Tensor, options: dict[str, Any]
) -> None:
    """Expect a step to leave the gradient of a weight of each layout as it is."""
    for name, weight in (("a contiguous", start.clone()), *layouts(start)):
        param = torch.nn.Parameter(weight)
        optimizer = make_algorithm(impl, algorithm, [param], **options)
        param.grad = grad.clone()
        optimizer.step()
        what = f"the gradient of {name} {start.dtype} weight"
        expect_bits(exactly(param.grad.to_dense()), exactly(grad.to_dense()), what)


@pytest.mark.clause("ALGO-041")
@pytest.mark.plain_only("it makes an optimizer for each option")
@pytest.mark.needs("{algorithm}")
@every
def test_gradients_are_left_with_each_option(impl, algorithm):
    """With each option, with decay and without, a step modifies no gradient in any dtype or layout."""

    def check(options: dict[str, Any]) -> None:
        for dtype in impl.dtypes:
            start = parameter(4, 3, dtype=dtype).detach()
            expect_left(impl, algorithm, start, _numbers((4, 3), 1).to(start), options)

    with_each_option(impl, algorithm, check)
    with_each_option(impl, algorithm, check, decay=False)


@pytest.mark.clause("ALGO-041")
@pytest.mark.plain_only("it makes an optimizer for each option")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@every
def test_sparse_gradients_are_left_with_each_option(impl, algorithm):
    """With each option, a step modifies no sparse gradient."""
    start = parameter(4, 3).detach()
    grad = sparse_rows([3, 1, 3], _numbers((3, 3), 1), start)

    def check(options: dict[str, Any]) -> None:
        expect_left(impl, algorithm, start, grad, options)

    with_each_option(impl, algorithm, check, decay=False)
