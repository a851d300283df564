"""Accumulating optimizers: the precision of the sum of a window."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import make_accumulating
from keyedopt.conformance.suite.support.assertions import expect
from keyedopt.conformance.suite.support.device import as_tensor, full, ones, zeros
from keyedopt.conformance.suite.support.measured import Measuring


def aggregated(impl: Any, kind: str, count: int, window: int) -> float:
    """Aggregate `count` gradients into one row; return the error relative to the sum of magnitudes."""
    fractions = torch.arange(1, count + 1, dtype=torch.float64) * 0.6180339887498949 % 1
    grads = as_tensor(fractions, dtype=torch.float32) if kind == "spread" else full((count,), 0.1)
    mine = torch.nn.Parameter(zeros(2, 1))
    optimizer = make_accumulating(impl, "AccumulateSGD", [mine], window, lr=1.0)
    for part in grads.chunk(window):
        rows = ones(1, len(part), dtype=torch.int64)
        mine.grad = torch.sparse_coo_tensor(rows, part[:, None], (2, 1), check_invariants=False)
        optimizer.step()
    total = float(grads.double().sum())
    return abs(float(-mine.detach()[1, 0].double()) - total) / total


@pytest.mark.clause("ACC-019")
@pytest.mark.parametrize("kind", ["equal", "spread"])
@pytest.mark.parametrize("window", [1, 10])
def test_documented_precision(impl, kind, window):
    """Up to 10,000 aggregated embeddings the error is at most 0.01 %."""
    error = aggregated(impl, kind, 10_000, window)
    expect(error <= 1e-4, "an error of at most 1e-4", error)


@pytest.mark.plain_only("it takes seconds")
@pytest.mark.clause("ACC-020")
@pytest.mark.parametrize(
    ("kind", "count", "window", "bound"),
    [
        ("equal", 10_000, 1, 1e-6),
        ("equal", 10_000, 100, 1e-6),
        ("spread", 10_000, 10, 1e-6),
        ("equal", 10_000_000, 4, 1e-5),
    ],
)
def test_precision(impl, kind, count, window, bound):
    """The relative error of 10,000 gradients is at most 1e-6, and that of 10 million at most 1e-5."""
    with Measuring({"errors": []}) as measuring:
        error = aggregated(impl, kind, count, window)
        entry = {"quantity": "sum", "dtype": "float32", "rows": count, "unit": "relative"}
        measuring.record["errors"].append({**entry, "error": float(f"{error:.1e}"), "budget": bound})
        expect(error <= bound, f"an error of at most {bound}", error)
    return measuring.record
