"""The error budget of a row: the worst of 32 orders of the published formula, in float32."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from keyedopt.conformance.golden.arithmetic import Exact, Rounded
from keyedopt.conformance.golden.formulas import FORMULAS
from keyedopt.fused.backends.interface import Step

#: The formula of each algorithm, and the names of its states there.
NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "sgd": ("SGD", ("momentum_buffer",)),
    "adagrad": ("Adagrad", ("sum",)),
    "rowwise_adagrad": ("RowWiseAdagrad", ("sum",)),
    "adam": ("Adam", ("exp_avg", "exp_avg_sq")),
    "sparse_adam": ("Adam", ("exp_avg", "exp_avg_sq")),
    "partial_rowwise_adam": ("PartialRowWiseAdam", ("exp_avg", "exp_avg_sq")),
    "lamb": ("LAMB", ("exp_avg", "exp_avg_sq")),
    "partial_rowwise_lamb": ("PartialRowWiseLAMB", ("exp_avg", "exp_avg_sq")),
    "lars_sgd": ("LarsSGD", ("momentum_buffer",)),
}
OPTIONS = (
    *("momentum", "dampening", "nesterov", "weight_decay", "decay", "maximize", "eps", "lr_decay"),
    *("max_norm", "betas", "eps_placement", "eta"),
)
ORDERS = 32


def worst_of_orders(
    old: list[Tensor], grad: Tensor, count: int, step: Step, right: list[Tensor], units: list[Tensor]
) -> list[float]:
    """Return the worst error of each tensor of a row, in half of the orders with fused multiply-add.

    Args:
        old: the row of the weight and of each state before the step.
        grad: its gradient, in float64.
        count: the number of the step.
        step: the step, which must have options that `right` had.
        right: the row of each tensor after the step, in float64.
        units: the unit of each element.

    Raises:
        AssertionError: the formula, evaluated exactly, is another than that of `right`.
    """
    name, states = NAMES[step.algorithm]
    options: Mapping[str, Any] = {key: getattr(step, key) for key in OPTIONS} | {"lr": float(step.lr)}

    def errors(arithmetic: Any, given: Tensor, rounded: bool) -> list[float]:
        def numbers(tensor: Tensor) -> list[Any]:
            return [arithmetic.number(float(x)) for x in tensor.reshape(-1)]

        state = {key: numbers(one) for key, one in zip(states, old[1:], strict=False)}
        time = 1 if step.first and name == "SGD" else max(count, 2 if name == "SGD" else 1)
        row = FORMULAS[name](arithmetic, numbers(old[0]), numbers(given), state, time, options)
        found = []
        for before, seen, exact, unit in zip(old, (row, *state.values()), right, units, strict=True):
            values = torch.tensor([float(x) for x in seen], dtype=torch.float64)
            values = values.to(before.dtype).double() if rounded else values
            found.append(float(((values - exact.reshape(-1)).abs() / unit.reshape(-1)).max()))
        return found

    assert max(errors(Exact(), grad, False)) < 1e-3, f"the formula of {step.algorithm} is another one"
    worst = [errors(Rounded("float32", order), grad.float(), True) for order in range(ORDERS)]
    return [max(each) for each in zip(*worst, strict=True)]
