"""What Adam and its kin share: two moments, and a count of steps for the parameter or for each row."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from keyedopt.reference.option_checks import check_betas, check_range
from keyedopt.reference.rule_optimizer import Applied, RuleOptimizer, counter
from keyedopt.reference.rules.options import BiasCorrection, Decay, Rows


class AdamLike(RuleOptimizer):
    """A rule with the moments `exp_avg` and `exp_avg_sq`.

    State: the moments, and `step`: one count, or (rows,) where bias correction is per row.
    """

    #: The rule.
    function: Callable[..., tuple[Tensor, Tensor, Tensor]]
    #: Whether the second moment is one number a row.
    partial_rowwise = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        decay: Decay | str = Decay.DECOUPLED,
        bias_correction: BiasCorrection | str = BiasCorrection.GLOBAL,
        rows: Rows | str = Rows.GIVEN,
        error_if_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            decay=decay,
            bias_correction=bias_correction,
            rows=rows,
            error_if_nonfinite=error_if_nonfinite,
        )

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Refuse options out of range."""
        super().check_options(group)
        Decay(group["decay"])
        BiasCorrection(group["bias_correction"])
        check_betas(group["betas"])
        check_range("eps", group["eps"])

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return moments of zero."""
        zeros = torch.zeros_like(param, requires_grad=False)
        state = {"step": counter(), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        if self.partial_rowwise:
            state["exp_avg_sq"] = zeros.new_zeros(len(param))
        if BiasCorrection(group["bias_correction"]) is BiasCorrection.PER_ROW:
            state["step"] = torch.zeros(len(param), dtype=torch.float64, device=param.device)
        return state

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the rule, all but `step`."""
        names = ("lr", "betas", "eps", "weight_decay", "maximize")
        return {name: group[name] for name in names} | {"decay": Decay(group["decay"])}

    def rule(self, group: Mapping[str, Any], state: Mapping[str, Tensor], first: bool) -> Applied:
        """Return the rule with the options of the group; a count a row is one more state of a row."""
        options = self.options(group)
        function = type(self).function

        def counted(*tensors: Tensor) -> tuple[Tensor, ...]:
            return function(*tensors, step=float(state["step"]), **options)

        def counted_per_row(*tensors: Tensor) -> tuple[Tensor, ...]:
            count = tensors[-1] + 1
            return *function(*tensors[:-1], step=count, **options), count

        if state["step"].ndim:
            return counted_per_row, ("exp_avg", "exp_avg_sq", "step")
        return counted, ("exp_avg", "exp_avg_sq")
