"""Measurements of a case, recorded also if the case fails.

The record of a case that measures errors is ``{"errors": [entry, …]}``; an entry has ``quantity``, ``dtype``,
``error`` (None if it is not finite), ``budget``, ``unit`` and, if they apply, the number of ``steps`` taken
and the number of aggregated gradients (``rows``). The entry of a median has ``draws``, the number of draws,
and no budget. The record of a case that follows a schedule is ``{"rates": [[iteration, rate], …]}``.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import (
    Mismatch,
    error_budget,
    exactly,
    expect_within,
    ulp_error,
    unlike,
)

#: No formula may be off by more ULPs in float32: a bound that adds up the worst of many steps says nothing.
HALF_OF_DIGITS = 2.0**12
#: The attribute of an error that contains the measurements before it.
MEASURED = "keyedopt_measured"


class Measuring:
    """A context manager that continues after the first mismatch and raises it at the end, with the record.

    Args:
        record: The return value of the case, which is filled during the case.
    """

    def __init__(self, record: Any) -> None:
        self.record = record
        self.first: Mismatch | None = None

    def __enter__(self) -> "Measuring":
        """Return this context manager."""
        return self

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """Defer a mismatch to the end; only the first one is kept."""
        try:
            yield
        except Mismatch as error:
            self.first = self.first or error

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Raise the first mismatch, or let another error propagate, with the record attached."""
        error = self.first or error
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):
                setattr(error, MEASURED, self.record)
        if self.first is not None:
            raise self.first


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


def note_error(
    measuring: Measuring,
    seen: torch.Tensor,
    exact: torch.Tensor,
    budget: float,
    before: torch.Tensor | float = 0.0,
    **entry: Any,
) -> None:
    """Record an error in units in the last place, and its budget."""
    error = ulp_error(seen, exact, before) if seen.shape == exact.shape else float("inf")
    numbers = {"error": _finite(round(error, 3)), "budget": round(budget, 3), "unit": "ULP"}
    measuring.record["errors"].append(entry | numbers)


def note_median(measuring: Measuring, errors: torch.Tensor, quantity: str, **entry: Any) -> None:
    """Record the median over draws of their worst errors, in units in the last place."""
    numbers = {"error": _finite(round(float(errors.median()), 3)), "unit": "ULP", "draws": errors.numel()}
    measuring.record["errors"].append({"quantity": f"{quantity}, median"} | entry | numbers)


def measure_error(
    measuring: Measuring,
    seen: torch.Tensor,
    exact: torch.Tensor,
    budget: float,
    what: str,
    before: torch.Tensor | float = 0.0,
    **entry: Any,
) -> None:
    """Record an error in units in the last place, and expect it within its budget."""
    note_error(measuring, seen, exact, budget, before, **entry)
    with measuring.expecting():
        expect_within(seen, exact, budget, what, before=before)


def measure_relative(
    measuring: Measuring, seen: torch.Tensor, exact: torch.Tensor, size: torch.Tensor, what: str, **entry: Any
) -> None:
    """Record an error in float64 relative to the size of each value, and expect it within 1e-12."""
    gap = (exactly(seen) - exact).abs()
    relative = torch.where(gap == 0, 0.0, gap / size).nan_to_num(nan=float("inf"))
    error = float(f"{float(relative.max()):.2g}") if relative.numel() else 0.0
    numbers = {"error": _finite(error), "budget": 1e-12, "unit": "relative"}
    measuring.record["errors"].append(entry | numbers)
    with measuring.expecting():
        wrong = ~(relative <= 1e-12)
        if bool(wrong.any()):
            said = f"{unlike(seen, exact, wrong)}{seen.tolist()}"
            raise Mismatch(f"{what} within 1e-12 of {exact.tolist()}", said)


def measure_golden(
    measuring: Measuring,
    made: Any,
    step: int,
    dtype: str,
    tensors: Mapping[str, torch.Tensor],
    beta2: float | None = None,
) -> None:
    """Measure tensors by name after a step of a golden trajectory that has exact values for this step.

    The weight comes first. State whose name is not known is not measured.
    In float64 they are expected within 1e-12; state of a wider dtype is first rounded to the tested dtype.
    Otherwise precision is judged by the budget of the trajectory. With `beta2` the formula is judged, by the
    bound that no order of it exceeds, and no more than half of float32's digits are wrong. If a target
    computes the bias correction 1 - beta2 ** step in the tested dtype, its relative error is up to
    1 / (1 - beta2 ** step) roundings. Bounds are multiplied by this number; with weight decay the moments
    inherit the error of the weight.
    """
    for name, exact in made["after"].get(str(step), {}).items():
        if name not in tensors and name != "weight":
            continue
        seen = tensors[name].detach().reshape(-1)
        powers = made["exponent"][str(step)][name]
        size = torch.tensor([0.0 if x is None else 2.0**x for x in powers], dtype=torch.float64)
        oracle = torch.tensor(exact, dtype=torch.float64)
        what, entry = f"{name} after step {step}", {"quantity": name, "dtype": dtype, "steps": step}
        if dtype == "float64":
            measure_relative(measuring, seen, oracle, size, f"{dtype} {what}", **entry)
            continue
        if beta2 is None:
            budget = error_budget(made["worst"][dtype][str(step)][name])
        else:
            budget = min(max(2.0, made["bound"][str(step)][name]) / (1 - beta2**step), HALF_OF_DIGITS)
        measure_error(measuring, seen.to(getattr(torch, dtype)), oracle, budget, what, before=size, **entry)
