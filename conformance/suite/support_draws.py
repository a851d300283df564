"""Errors in the median of many draws: the worst error of a single one is a matter of luck.

A draw is a golden trajectory whose weights and gradients are multiplied by numbers between a half and one and
a half. All draws are rows of one table, so they take one training. The oracle is the same implementation in
float64, which other cases hold to the golden trajectory within 1e-12.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from keyedopt.conformance.suite.support import _numbers, ulp_errors
from keyedopt.conformance.suite.support_measured import Measuring, note_median

#: How many; an odd number, so that the median is one of them. Triton's interpreter has time for fewer.
DRAWS = 9 if os.environ.get("TRITON_INTERPRET") == "1" else 33

#: The rows that a gradient lists, or an empty list for all, and the gradient.
Steps = Sequence[tuple[list[int], torch.Tensor]]


def drawn(made: Mapping[str, Any], kind: torch.dtype) -> tuple[torch.Tensor, Steps]:
    """Return the table (DRAWS * rows, columns) of all draws, and its steps, in float64, rounded to a dtype."""

    def draw(numbers: Any, unit: float, seed: int) -> torch.Tensor:
        values = torch.tensor(numbers, dtype=torch.float64).repeat(DRAWS, 1) * unit
        return (values * (1 + _numbers(values.shape, seed) / 2)).to(kind).double()

    count = len(made["weight"])
    steps = []
    for seed, step in enumerate(made["steps"], 1):
        rows = [row + count * one for one in range(DRAWS) for row in step["rows"]]
        steps.append((rows, draw(step["grads"], made["unit"], seed)))
    return draw(made["weight"], 1 / 64, 0), steps


def measure_draws(
    measuring: Measuring,
    made: Mapping[str, Any],
    dtype: str,
    train: Callable[[torch.Tensor, Steps, torch.dtype], Iterator[Mapping[str, torch.Tensor]]],
) -> None:
    """Note the median over all draws of their worst errors, tensor by tensor; not in float64, the oracle.

    Args:
        measuring: where it is noted.
        made: a golden trajectory; errors are measured after those steps after which it says what is exact.
        dtype: of what is trained.
        train: given a table, steps and a dtype, trains and yields tensors in row order after each step.
    """
    if dtype == "float64":
        return
    kind = getattr(torch, dtype)
    weight, steps = drawn(made, kind)
    exact = [{"weight": weight.reshape(-1)}, *_numbered(train(weight, steps, torch.float64))]
    worst: dict[str, torch.Tensor] = {}
    for t, seen in enumerate(_numbered(train(weight, steps, kind), kind), 1):
        for name in made["after"].get(str(t), ()):
            before = exact[t - 1].get(name, torch.zeros(()))
            errors = ulp_errors(seen[name].to(kind), exact[t][name], before).reshape(DRAWS, -1).amax(dim=1)
            worst[name] = torch.maximum(worst.get(name, errors), errors)
    for name, errors in worst.items():
        note_median(measuring, errors, quantity=name, dtype=dtype)


def _numbered(
    training: Iterator[Mapping[str, torch.Tensor]], kind: torch.dtype = torch.float64
) -> Iterator[dict[str, torch.Tensor]]:
    """Copy the tensors of each step: a number after the other, in a dtype."""
    for tensors in training:
        yield {name: value.detach().cpu().to(kind).reshape(-1).clone() for name, value in tensors.items()}
