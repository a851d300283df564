"""Trajectories in many draws: the worst error of a single one is a matter of luck, the median of many is not.

The first draw is a golden trajectory, the others have its weights and gradients, multiplied by numbers
between a half and one and a half. All draws are rows of one table, so they take one training. The oracle of
the others is the same implementation in float64, which other cases hold to the golden one within 1e-12.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import ulp_errors
from keyedopt.conformance.suite.support.inputs import INTERPRETED, _numbers
from keyedopt.conformance.suite.support.measured import Measuring, measure_golden, note_median

#: How many; an odd number, so that the median is one of them. Triton's interpreter has time for fewer.
DRAWS = 9 if INTERPRETED else 33

#: The rows that a gradient lists, or an empty list for all, and the gradient.
Steps = Sequence[tuple[list[int], torch.Tensor]]
#: Given a table, steps and a dtype, it trains and yields tensors by name, in row order, after each step.
Train = Callable[[torch.Tensor, Steps, torch.dtype], Iterator[Mapping[str, torch.Tensor]]]


def drawn(made: Mapping[str, Any], kind: torch.dtype, draws: int) -> tuple[torch.Tensor, Steps]:
    """Return the table (draws * rows, columns) of all draws, and its steps; float64, rounded to a dtype."""

    def draw(numbers: Any, unit: float, seed: int) -> torch.Tensor:
        values = torch.tensor(numbers, dtype=torch.float64) * unit
        factors = 1 + _numbers((draws, *values.shape), seed) / 2
        factors[0] = 1
        return (factors * values).flatten(0, 1).to(kind).double()

    count = len(made["weight"])
    steps = []
    for seed, step in enumerate(made["steps"], 1):
        rows = [row + count * one for one in range(draws) for row in step["rows"]]
        steps.append((rows, draw(step["grads"], made["unit"], seed)))
    return draw(made["weight"], 1 / 64, 0), steps


def measure_trajectory(measuring: Measuring, made: Mapping[str, Any], dtype: str, train: Train) -> None:
    """Expect the tensors of the golden trajectory within their budgets; note medians of errors by tensor.

    A median is over all draws, of the worst error of each after those steps after which `made` says what is
    exact. In float64, the oracle, there is one draw, and none.
    """
    kind = getattr(torch, dtype)
    draws = 1 if kind is torch.float64 else DRAWS
    weight, steps = drawn(made, kind, draws)
    exact = [_flat({"weight": weight})]
    if draws > 1:
        exact += map(_flat, train(weight.clone(), steps, torch.float64))
    worst: dict[str, torch.Tensor] = {}
    for t, tensors in enumerate(train(weight.clone(), steps, kind), 1):
        seen = _flat(tensors)
        first = {name: value[: len(value) // draws] for name, value in seen.items()}
        measure_golden(measuring, made, t, dtype, first)
        for name in made["after"].get(str(t), ()) if draws > 1 else ():
            before = exact[t - 1].get(name, torch.zeros(()))
            errors = ulp_errors(seen[name].to(kind), exact[t][name], before).reshape(draws, -1).amax(dim=1)
            worst[name] = torch.maximum(worst.get(name, errors), errors)
    for name, errors in worst.items():
        note_median(measuring, errors, quantity=name, dtype=dtype)


def _flat(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors, a number after the other."""
    return {name: value.detach().cpu().reshape(-1).clone() for name, value in tensors.items()}
