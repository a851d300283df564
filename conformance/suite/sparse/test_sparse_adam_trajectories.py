"""SparseAdam against its golden trajectories: in float64 to 1e-12, otherwise within a budget."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.algorithms import exact_dtype, need_dtype, variant_of
from keyedopt.conformance.suite.support.device import as_tensor, tensor
from keyedopt.conformance.suite.support.draws import Steps, measure_trajectory
from keyedopt.conformance.suite.support.measured import Measuring
from keyedopt.conformance.suite.support.trajectories import in_variant

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "sparse_adam.json").read_text("utf-8"))[
    "trajectories"
]


def golden(*names: str) -> dict[str, Any]:
    """Select golden trajectories by name, as arguments of ``parametrize``."""
    return {"argnames": "made", "argvalues": [GOLDEN[name] for name in names], "ids": list(names)}


def follow(
    impl: Any, made: Any, dtype: str, names: tuple[str, ...] = (), beta2: float | None = None
) -> dict[str, Any]:
    """Train along a trajectory; expect weight and named state within their budgets; return errors."""
    need_dtype(impl, "SparseAdam", dtype)
    made = in_variant(made, variant_of(impl, "SparseAdam"), dtype, beta2 is not None)
    after = made["after"].items()
    made = {**made, "after": {t: {name: exact[name] for name in ("weight", *names)} for t, exact in after}}

    def train(start: Any, steps: Steps, kind: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
        weight = torch.nn.Parameter(as_tensor(start, dtype=kind))
        optimizer = impl.SparseAdam([weight], **made["options"])
        for rows, grads in steps:
            listed = tensor([rows], dtype=torch.int64)
            weight.grad = torch.sparse_coo_tensor(
                listed, as_tensor(grads, dtype=kind), weight.shape, check_invariants=True
            )
            optimizer.step()
            yield {"weight": weight.detach(), **{name: optimizer.state[weight][name] for name in names}}

    with Measuring({"errors": []}) as measuring:
        measure_trajectory(measuring, made, dtype, train, beta2, "float64" in impl.dtypes)
    return measuring.record


def follow_formula(impl: Any, made: Any) -> None:
    """Train along a trajectory in the most precise dtype; the precision in others has clauses of its own."""
    follow(impl, made, exact_dtype(impl), beta2=made["options"].get("betas", (0.9, 0.999))[1])


@pytest.mark.clause("SPARSE-003")
@pytest.mark.parametrize(**golden("plain"))
def test_formula(impl, made):
    """The listed elements follow Adam's formula, with the count of all steps."""
    follow_formula(impl, made)


@pytest.mark.clause("SPARSE-005")
@pytest.mark.parametrize(**golden("betas"))
def test_betas(impl, made):
    """The betas are the decay rates of the two moments."""
    follow_formula(impl, made)


@pytest.mark.clause("SPARSE-006")
@pytest.mark.parametrize(**golden("maximize"))
def test_maximize(impl, made):
    """With maximize the objective increases."""
    follow_formula(impl, made)


@pytest.mark.clause("SPARSE-007")
@pytest.mark.parametrize(**golden("eps"))
def test_eps(impl, made):
    """The eps is added to the square root of the second moment before the bias correction."""
    follow_formula(impl, made)


@pytest.mark.clause("SPARSE-008")
@pytest.mark.parametrize(**golden("plain", "betas", "maximize", "eps"))
def test_precision(impl, made, dtype):
    """The error is at most twice the worst of 64 orders of the formula in the same dtype, or 2 ULP."""
    return follow(impl, made, dtype, ("exp_avg", "exp_avg_sq"))


@pytest.mark.clause("SPARSE-009")
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize(**golden("extreme"))
def test_extreme_magnitudes(impl, made, precision):
    """Gradients of 2^-40 and 2^20 in one row lose no more precision than rounding causes."""
    return follow(impl, made, precision, ("exp_avg", "exp_avg_sq"))
