"""Trajectories in many random draws: the worst error of one draw is random, the median of many is stable.

The first draw is a golden trajectory; the others multiply its weights and gradients by factors between 0.5
and 1.5. All draws are rows of one table and are trained together. The oracle of the other draws is the same
implementation in float64, which further cases compare with the golden trajectory to within 1e-12.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import ulp_errors
from keyedopt.conformance.suite.support.inputs import INTERPRETED, _numbers
from keyedopt.conformance.suite.support.measured import Measuring, measure_golden, note_median

#: Number of draws, odd so that the median is one of them. Triton's interpreter is slow, so it gets fewer.
DRAWS = 9 if INTERPRETED else 33

#: The rows that a gradient lists, or an empty list for all, and the gradient.
Steps = Sequence[tuple[list[int], torch.Tensor]]
#: Train on a table with steps in a dtype; yield tensors by name, in row order, after each step.
Train = Callable[[torch.Tensor, Steps, torch.dtype], Iterator[Mapping[str, torch.Tensor]]]


def drawn(made: Mapping[str, Any], kind: torch.dtype, draws: int) -> tuple[torch.Tensor, Steps]:
    """Return the table (draws * rows, columns) of all draws, and its steps, in float64 rounded to a dtype."""

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


def measure_trajectory(
    measuring: Measuring,
    made: Mapping[str, Any],
    dtype: str,
    train: Train,
    beta2: float | None = None,
    oracle: bool = True,
) -> None:
    """Expect the golden trajectory's tensors within their budgets; record the median errors per tensor.

    A median is taken over all draws, of the worst error of each draw after the steps for which `made`
    contains exact values. There is only the golden draw and no median in float64, which is the oracle of the
    other draws, if the formula is judged, if the target has no float64, and in variants with norms of whole
    tables.

    Args:
        measuring: receives the errors.
        made: the golden trajectory.
        dtype: the tested dtype.
        train: trains with the target, and yields its tensors after each step.
        beta2: see `measure_golden`.
        oracle: whether the target has float64.
    """
    kind = getattr(torch, dtype)
    per_tensor = "per_tensor" in made.get("variant", "")
    one_draw = kind is torch.float64 or beta2 is not None or not oracle or per_tensor
    draws = 1 if one_draw else DRAWS
    weight, steps = drawn(made, kind, draws)
    exact = [_flat({"weight": weight})]
    if draws > 1:
        exact += map(_flat, train(weight.clone(), steps, torch.float64))
    worst: dict[str, torch.Tensor] = {}
    for t, tensors in enumerate(train(weight.clone(), steps, kind), 1):
        seen = _flat(tensors)
        first = {name: value[: len(value) // draws] for name, value in seen.items()}
        measure_golden(measuring, made, t, dtype, first, beta2)
        for name in sorted(seen.keys() & made["after"].get(str(t), {})) if draws > 1 else ():
            before = exact[t - 1].get(name, torch.zeros(()))
            errors = ulp_errors(seen[name].to(kind), exact[t][name], before).reshape(draws, -1).amax(dim=1)
            worst[name] = torch.maximum(worst.get(name, errors), errors)
    for name, errors in worst.items():
        note_median(measuring, errors, quantity=name, dtype=dtype)


def _flat(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors to flat CPU tensors."""
    return {name: value.detach().cpu().reshape(-1).clone() for name, value in tensors.items()}
