"""What Adam and its kin share: two moments, and a count of steps for the parameter or for each row."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from keyedopt.fused.dense.initial_state import counter, full_state, row_state
from keyedopt.fused.option_checks import check_betas, check_range
from keyedopt.fused.row_optimizer import RowOptimizer
from keyedopt.reference.rules.options import BiasCorrection, Decay, Rows


class AdamLike(RowOptimizer):
    """An algorithm with the moments `exp_avg` and `exp_avg_sq`.

    State: the moments, and `step`: one count, or (rows,) where bias correction is per row.
    """

    #: Whether the second moment is one number a row.
    partial_rowwise: ClassVar[bool] = False

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

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return moments of zero, and a count of zero."""
        count = counter(param)
        if BiasCorrection(group["bias_correction"]) is BiasCorrection.PER_ROW:
            count = row_state(param, dtype=torch.float64)
        return {
            "step": count,
            "exp_avg": full_state(param),
            "exp_avg_sq": row_state(param) if self.partial_rowwise else full_state(param),
        }
