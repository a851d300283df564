"""Helpers for cases of gradient accumulation: a table, a gradient for each step, windows."""

from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import exactly, expect
from keyedopt.conformance.suite.support.device import arange, tensor, zeros

ACCUMULATING = ("AccumulateSGD", "AccumulateAdagrad", "AccumulateAdam")

#: Accumulating optimizers that the document of the others does not have.
MORE_ACCUMULATING = ("AccumulateRowWiseAdagrad", "AccumulateAdamW")

#: The layouts of the micro-batches of a window.
WINDOWS = (
    ("sparse", "dense", "dense", "few", "empty"),
    ("dense", "few", "dense", "dense", "empty"),
    ("empty", "few", "sparse", "dense", "dense"),
    ("dense", "dense", "sparse", "empty", "few"),
)
#: Micro-batches of an embedding module: of many rows and few, with and without values.
WINDOW_BATCHES: tuple[dict[str, Any], ...] = (
    {"f": [[0, 1, 1], [2, 3]], "g": [[4], [1, 5]], "h": [[3, 3], [0]]},
    {"f": [[2], []], "g": [[], []], "h": [[4], []]},
    {"f": [[], []], "g": [[], []], "h": [[], []]},
    {"f": [[1], []], "g": [[3], []], "h": [[], [4]]},
    {"f": [[5], [2]], "g": [[], []], "h": [[], [1]]},
)


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


def micro_batch(step: int, layout: str) -> torch.Tensor:
    """Make the gradient of a step."""
    if layout == "empty":
        return torch.sparse_coo_tensor(zeros(1, 0, dtype=torch.int64), zeros(0, 4), (6, 4))
    if layout == "few":
        return torch.sparse_coo_tensor(tensor([[5]]), gradient_of_step(step)[:1], (6, 4))
    return gradient_of_step(step, layout)


def train_micro_batches(optimizer: Any, param: Any, window: tuple[str, ...], steps: range) -> None:
    """Take the steps of a window."""
    for step in steps:
        param.grad = micro_batch(step, window[step])
        optimizer.step()


def train_sum(optimizer: Any, param: Any, window: tuple[str, ...]) -> None:
    """Take one step with the sum of a window."""
    param.grad = torch.stack(
        [micro_batch(step, layout).to_dense() for step, layout in enumerate(window)]
    ).sum(0)
    optimizer.step()
