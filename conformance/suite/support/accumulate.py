"""Helpers for cases of gradient accumulation: a table, a gradient for each step, windows."""

from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import exactly, expect
from keyedopt.conformance.suite.support.device import arange, tensor

ACCUMULATING = ("AccumulateSGD", "AccumulateAdagrad", "AccumulateAdam")


def fixed_table(dtype: str = "float32") -> torch.nn.Parameter:
    """Make a table of fixed numbers."""
    return torch.nn.Parameter(((arange(24.0).reshape(6, 4) * 7 % 24 - 11) / 8).to(getattr(torch, dtype)))


def gradient_of_step(step: int, layout: str = "dense") -> torch.Tensor:
    """Make the gradient of a step: dense, or sparse with duplicate rows."""
    numbers = (arange(24.0).reshape(6, 4) * (5 + step) % 23 - 11) / 16
    if layout == "dense":
        return numbers
    rows = tensor([[(step + i * i) % 5 for i in range(6)]])
    return torch.sparse_coo_tensor(rows, numbers, (6, 4), check_invariants=True)


def make_accumulating(impl: Any, kind: str, params: Any, window: int = 3, **options: Any) -> Any:
    """Make an optimizer that accumulates."""
    made = {"lr": 0.125, "use_accumulate": True, "accumulate_step": window, **options}
    return getattr(impl, kind)(params, **made)


def train_window(optimizer: Any, param: torch.nn.Parameter, steps: Any, layout: str = "dense") -> None:
    """Take steps, each with its own gradient."""
    for step in steps:
        param.grad = gradient_of_step(step, layout).to(param.dtype)
        optimizer.step()


def expect_near(seen: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Expect values around 1 to agree after several steps in float32."""
    error = float((exactly(seen) - exactly(wanted)).abs().max())
    expect(error <= 2e-6, f"{what} within 2e-6", f"an error of {error}")
