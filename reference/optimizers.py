"""The optimizers whose names upstream has as placeholders. These run.

`SGD`, `Adagrad` and `Adam` follow torch's documents; `LAMB`, `LarsSGD`, `PartialRowWiseAdam` and
`PartialRowWiseLAMB` follow FBGEMM's, and work on tables. Where libraries differ there is an argument.
State is in the dtype of its parameter; every computation is in float32 at least.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from keyedopt.reference import rules
from keyedopt.reference.adam_like import AdamLike
from keyedopt.reference.option_checks import check_range
from keyedopt.reference.rowwise_adagrad import Adagrad
from keyedopt.reference.rule_optimizer import Applied, RuleOptimizer
from keyedopt.reference.rules.options import BiasCorrection, Decay, EpsPlacement, Rows

__all__ = ["LAMB", "SGD", "Adagrad", "Adam", "LarsSGD", "PartialRowWiseAdam", "PartialRowWiseLAMB"]


class SGD(RuleOptimizer):
    """Stochastic gradient descent, see `rules.sgd`. State: `momentum_buffer`, with momentum only."""

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

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return a buffer of zeros, or nothing without momentum."""
        if not group["momentum"]:
            return {}
        return {"momentum_buffer": torch.zeros_like(param, requires_grad=False)}

    def rule(self, group: Mapping[str, Any], state: Mapping[str, Tensor], first: bool) -> Applied:
        """Return `rules.sgd` with the options of the group."""
        names = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "maximize")
        options = {name: group[name] for name in names}
        buffers = tuple(name for name in state if name == "momentum_buffer")
        return functools.partial(rules.sgd, first=first, decay=Decay(group["decay"]), **options), buffers


class Adam(AdamLike):
    """Adam, see `rules.adam`; with ``decay="decoupled"`` it is AdamW."""

    function = staticmethod(rules.adam)

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
        RuleOptimizer.__init__(
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

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the rule, all but `step`."""
        return super().options(group) | {"eps_placement": EpsPlacement(group["eps_placement"])}


class PartialRowWiseAdam(AdamLike):
    """Adam with one second moment a row, see `rules.partial_rowwise_adam`; `exp_avg_sq` is (rows,)."""

    function = staticmethod(rules.partial_rowwise_adam)
    tables_only = partial_rowwise = True


class LAMB(AdamLike):
    """LAMB with the norms of rows, see `rules.lamb`."""

    function = staticmethod(rules.lamb)
    tables_only = True


class PartialRowWiseLAMB(AdamLike):
    """LAMB with one second moment a row, see `rules.partial_rowwise_lamb`; `exp_avg_sq` is (rows,)."""

    function = staticmethod(rules.partial_rowwise_lamb)
    tables_only = partial_rowwise = True


class LarsSGD(RuleOptimizer):
    """LARS with the norms of rows, see `rules.lars_sgd`. State: `momentum_buffer`."""

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

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return a buffer of zeros."""
        return {"momentum_buffer": torch.zeros_like(param, requires_grad=False)}

    def rule(self, group: Mapping[str, Any], state: Mapping[str, Tensor], first: bool) -> Applied:
        """Return `rules.lars_sgd` with the options of the group."""
        names = ("lr", "momentum", "eta", "weight_decay", "maximize")
        return functools.partial(rules.lars_sgd, **{name: group[name] for name in names}), (
            "momentum_buffer",
        )
