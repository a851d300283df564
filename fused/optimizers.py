"""The optimizers whose names upstream has as placeholders, fast.

`SGD`, `Adagrad` and `Adam` follow torch's documents; `LAMB`, `LarsSGD`, `PartialRowWiseAdam` and
`PartialRowWiseLAMB` follow FBGEMM's, and work on tables. Their formulas are those of
`keyedopt.reference.rules`. State is in the dtype of its parameter; every computation is in float32 at least.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from keyedopt.fused.adam_like import AdamLike
from keyedopt.fused.dense.initial_state import full_state
from keyedopt.fused.option_checks import check_range
from keyedopt.fused.row_optimizer import RowOptimizer
from keyedopt.fused.rowwise_adagrad import Adagrad
from keyedopt.reference.rules.options import BiasCorrection, Decay, EpsPlacement, Rows

__all__ = ["LAMB", "SGD", "Adagrad", "Adam", "LarsSGD", "PartialRowWiseAdam", "PartialRowWiseLAMB"]


class SGD(RowOptimizer):
    r"""Stochastic gradient descent. State: `momentum_buffer`, with momentum only.

    .. math::
        b \leftarrow \mu b + (1 - \tau) g \;(\text{at first } g), \qquad w \leftarrow w - \gamma b
    """

    algorithm = "sgd"
    quick = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        decay: Decay | str = Decay.L2,
        rows: Rows | str = Rows.GIVEN,
        error_if_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            decay=decay,
            rows=rows,
            error_if_nonfinite=error_if_nonfinite,
        )

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Refuse options out of range."""
        super().check_options(group)
        Decay(group["decay"])
        check_range("momentum", group["momentum"])
        check_range("dampening", group["dampening"])
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ValueError("nesterov needs a momentum above 0, and no dampening")

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a buffer of zeros, or nothing without momentum."""
        return {"momentum_buffer": full_state(param)} if group["momentum"] else {}

    def state_names(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the buffer, where there is one."""
        return tuple(name for name in ("momentum_buffer",) if name in state)


class Adam(AdamLike):
    r"""Adam; with ``decay="decoupled"`` it is AdamW. State: `step`, `exp_avg`, `exp_avg_sq`.

    .. math::
        m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad v \leftarrow \beta_2 v + (1 - \beta_2) g^2, \quad
        w \leftarrow w - \gamma \, \hat m / (\sqrt{\hat v} + \epsilon)
    """

    algorithm = "adam"
    quick = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        decay: Decay | str = Decay.L2,
        eps_placement: EpsPlacement | str = EpsPlacement.INSIDE_DENOMINATOR,
        bias_correction: BiasCorrection | str = BiasCorrection.GLOBAL,
        rows: Rows | str = Rows.GIVEN,
        error_if_nonfinite: bool = False,
    ) -> None:
        RowOptimizer.__init__(
            self,
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
            eps_placement=eps_placement,
        )

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Refuse options out of range."""
        super().check_options(group)
        EpsPlacement(group["eps_placement"])


class PartialRowWiseAdam(AdamLike):
    """Adam with one second moment a row, the mean of the row's squares; `exp_avg_sq` is (rows,)."""

    algorithm = "partial_rowwise_adam"
    tables_only = partial_rowwise = True


class LAMB(AdamLike):
    """LAMB: Adam's direction r, with decay, at the length of the row: lr · ‖w‖ / ‖r‖ · r."""

    algorithm = "lamb"
    tables_only = True


class PartialRowWiseLAMB(AdamLike):
    """LAMB with one second moment a row, the mean of the row's squares; `exp_avg_sq` is (rows,)."""

    algorithm = "partial_rowwise_lamb"
    tables_only = partial_rowwise = True


class LarsSGD(RowOptimizer):
    r"""LARS with the norms of rows. State: `momentum_buffer`.

    .. math::
        b \leftarrow \mu b + \gamma \frac{\eta \lVert w \rVert}{\lVert g \rVert + \lambda \lVert w \rVert}
        (g + \lambda w), \qquad w \leftarrow w - b
    """

    algorithm = "lars_sgd"
    tables_only = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = 1e-3,
        *,
        maximize: bool = False,
        rows: Rows | str = Rows.GIVEN,
        error_if_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum=momentum,
            weight_decay=weight_decay,
            eta=eta,
            maximize=maximize,
            rows=rows,
            error_if_nonfinite=error_if_nonfinite,
        )

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Refuse options out of range."""
        super().check_options(group)
        check_range("momentum", group["momentum"])
        check_range("eta", group["eta"])

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a buffer of zeros."""
        return {"momentum_buffer": full_state(param)}
