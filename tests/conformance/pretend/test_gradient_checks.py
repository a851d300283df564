"""The checks of gradients in a step of `fused` on the pretend accelerator."""

import math

import pytest
import torch

import keyedopt.conformance.pretend  # noqa: F401 - registers the device
from keyedopt import fused, reference
from keyedopt.conformance.pretend import synchronizations

NPU = torch.device("npu")


def optimizer(package, rows_of_gradients, **options):
    """Return a SparseAdam on the accelerator; each parameter has 5 rows, and a gradient of the given rows."""
    params = [torch.nn.Parameter(torch.ones(5, 2, device=NPU)) for _ in rows_of_gradients]
    for param, rows in zip(params, rows_of_gradients, strict=True):
        indices, values = torch.tensor([rows], device=NPU), torch.ones(len(rows), 2, device=NPU)
        param.grad = torch.sparse_coo_tensor(indices, values, (5, 2), check_invariants=False)
    return package.SparseAdam(params, lr=0.1, **options), params


def waits_of_the_check(count, **options):
    stepped, _ = optimizer(fused, [[0, 3, 3]] * count, **options)
    with synchronizations() as waits:
        stepped.check_gradients()
    return len(waits)


@pytest.mark.parametrize("options", [{}, {"error_if_nonfinite": True}], ids=str)
def test_five_gradients_are_checked_with_one_wait(options):
    assert waits_of_the_check(1, **options) == waits_of_the_check(5, **options) == 1


@pytest.mark.parametrize("package", [reference, fused])
@pytest.mark.parametrize(("rows", "bad"), [([1, 5], 5), ([-1, 1], -1)])
def test_an_index_out_of_range_is_named_and_nothing_is_written(package, rows, bad):
    stepped, params = optimizer(package, [[0, 3], rows, []])
    with pytest.raises(ValueError, match=rf"must be in \[0, 5\), and {bad} is not"):
        stepped.step()
    assert all(param.tolist() == [[1.0, 1.0]] * 5 for param in params)
    assert not stepped.state


@pytest.mark.parametrize("package", [reference, fused])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_refused_and_nothing_is_written(package, bad):
    stepped, params = optimizer(package, [[0, 3], [1, 2]], error_if_nonfinite=True)
    params[1].grad._values()[1, 1] = bad
    with pytest.raises(RuntimeError, match="inf or NaN"):
        stepped.step()
    assert all(param.tolist() == [[1.0, 1.0]] * 5 for param in params)
    assert not stepped.state


def test_gradients_without_rows_are_checked_without_a_wait():
    stepped, _ = optimizer(fused, [[], []])
    with synchronizations() as waits:
        stepped.check_gradients()
    assert waits == []
