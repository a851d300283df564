"""FTRL-Proximal."""

import functools
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from keyedopt.reference import rules
from keyedopt.reference.option_checks import check_range
from keyedopt.reference.rule_optimizer import Applied, RuleOptimizer
from keyedopt.reference.rules.options import Rows

__all__ = ["Ftrl"]


def positive_rate(lr: float | Tensor) -> float:
    """Return a learning rate as a number.

    Raises:
        ValueError: the learning rate is not above 0.
    """
    if not float(lr) > 0:
        raise ValueError(f"lr must be above 0, not {float(lr)}: FTRL divides by it; warm up from above 0")
    return float(lr)


class Ftrl(RuleOptimizer):
    r"""FTRL-Proximal, "follow the regularized leader": `rules.ftrl`.

    .. math::
        g &\leftarrow g + \lambda w, \qquad n' = n + g^2 \\
        z &\leftarrow z + g + 2 \lambda_s w - \frac{n'^{-p} - n^{-p}}{\gamma} w, \qquad n \leftarrow n' \\
        w &\leftarrow \frac{\operatorname{clip}(z, -\lambda_1, \lambda_1) - z}
            {(\beta + n^{-p}) / \gamma + 2 \lambda_2}

    The weight is a function of the state: an element whose z is within ±λ₁ becomes 0, and so does the initial
    weight of an element whose first gradient is 0. With ``rows="nonzero"``, and with sparse gradients, rows
    without a gradient keep their weights.

    State, from the first step on: `accumulator`, n, and `linear`, z, both as the parameter.

    Args:
        params: parameters, or groups of parameters.
        lr: the learning rate γ, above 0; a tensor with one element is kept, and read at each step.
        lr_power: p, at most 0; 0 for steps that do not become smaller.
        initial_accumulator_value: n before the first step, at least 0.
        l1: λ₁, at least 0.
        l2: λ₂, at least 0, of the penalty λ₂‖w‖²; the λ₂ in the paper is twice as large.
        l2_shrinkage: λₛ, at least 0, of the penalty λₛ‖w‖² of the loss, whose gradient does not enter n.
        beta: β, at least 0.
        weight_decay: λ, at least 0; unlike `l2_shrinkage` it enters n, too.
        maximize: step along the gradient, not against it.
        rows: which rows a step updates: ``"given"`` by the gradient, ``"all"`` or ``"nonzero"``.
        error_if_nonfinite: raise RuntimeError in `step` if a gradient contains inf or NaN.

    Raises:
        ValueError: an option is out of range, or a parameter is not of floats. `step` raises it, too, if a
            learning rate is 0: the formula divides by it.

    Source: McMahan et al. 2013, algorithm 1; tf.keras.optimizers.Ftrl, whose defaults these are.

    >>> import torch
    >>> from keyedopt.reference import Ftrl
    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    >>> optimizer = Ftrl([weight], lr=0.5, initial_accumulator_value=0.0, l1=1.0)
    >>> weight.grad = torch.tensor([3.0, 0.5])
    >>> optimizer.step()
    >>> [round(one, 4) for one in weight.tolist()]
    [0.3333, 0.0]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        lr_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1: float = 0.0,
        l2: float = 0.0,
        l2_shrinkage: float = 0.0,
        beta: float = 0.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        rows: Rows | str = Rows.GIVEN,
        error_if_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            lr_power=lr_power,
            initial_accumulator_value=initial_accumulator_value,
            l1=l1,
            l2=l2,
            l2_shrinkage=l2_shrinkage,
            beta=beta,
            weight_decay=weight_decay,
            maximize=maximize,
            rows=rows,
            error_if_nonfinite=error_if_nonfinite,
        )

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if an option is out of range."""
        super().check_options(group)
        positive_rate(group["lr"])
        for name in ("initial_accumulator_value", "l1", "l2", "l2_shrinkage", "beta"):
            check_range(name, group[name])
        power = group["lr_power"]
        if not isinstance(power, int | float) or not -math.inf < power <= 0:
            raise ValueError(f"lr_power must be a finite number of at most 0, not {power!r}")

    def check_gradients(self) -> None:
        """Raise what `step` raises if a gradient, or a learning rate that was set later, cannot be used."""
        for group in self.param_groups:
            positive_rate(group["lr"])
        super().check_gradients()

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return an accumulator that starts at `initial_accumulator_value`, and a linear term of zeros."""
        start = group["initial_accumulator_value"]
        return {"accumulator": self.full_state(param, start), "linear": self.full_state(param)}

    def rule(self, group: Mapping[str, Any], state: Mapping[str, Any], first: bool) -> Applied:
        """Return `rules.ftrl` with the options of the group."""
        names = ("lr", "lr_power", "l1", "l2", "l2_shrinkage", "beta", "weight_decay", "maximize")
        options = {name: group[name] for name in names}
        return functools.partial(rules.ftrl, **options), ("accumulator", "linear")
