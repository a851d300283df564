"""Accumulating optimizers: the precision of the sum of a window."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import make_accumulating
from keyedopt.conformance.suite.support.assertions import expect, expect_equal
from keyedopt.conformance.suite.support.device import as_tensor, full, ones, zeros
from keyedopt.conformance.suite.support.embedding import ONE_TABLE, collection, tables_of, train_rows
from keyedopt.conformance.suite.support.measured import Measuring


def aggregated(impl: Any, kind: str, count: int, window: int) -> float:
    """Aggregate `count` gradients into one row; return the error relative to the sum of magnitudes."""
    if kind == "spread":
        fractions = torch.arange(1, count + 1, dtype=torch.float64) * 0.6180339887498949 % 1
        grads = as_tensor(fractions, dtype=torch.float32)
    else:
        grads = full((count,), 0.1)
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


@pytest.mark.clause("ACC-015")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize(
    ("half", "small"), [("float16", 2.0**-12), ("bfloat16", 2.0**-9)], ids=["float16", "bfloat16"]
)
def test_half_tables(impl, half, small):
    """Gradients of tables in half precision are stored and summed in float32."""
    window = {"lr": 1.0, "use_accumulate": True, "accumulate_step": 5}
    module = collection(impl, "AccumulateSGD", window, tables=ONE_TABLE, dtype=half)
    with torch.no_grad():
        tables_of(module)["t"].zero_()
    for grad in (1.0 + small, small, small, small, -1.0):
        train_rows(module, [2], full((1, 4), grad))
    expect_equal(tables_of(module)["t"].detach()[2].tolist(), [-4 * small] * 4, "the row")
