"""Adagrad and row-wise Adagrad."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from keyedopt.reference.option_checks import check_range
from keyedopt.reference.rule_optimizer import Applied, RuleOptimizer, counter
from keyedopt.reference.rules import adagrad, rowwise_adagrad
from keyedopt.reference.rules.options import Decay, Rows

__all__ = ["Adagrad", "RowWiseAdagrad"]


class Adagrad(RuleOptimizer):
    """Adagrad, see `rules.adagrad`. State, from construction on: `step`, and `sum` of all elements."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        decay: Decay | str = Decay.L2,
        rows: Rows | str = Rows.GIVEN,
        error_if_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
            maximize=maximize,
            decay=decay,
            rows=rows,
            error_if_nonfinite=error_if_nonfinite,
        )

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Refuse options out of range."""
        super().check_options(group)
        Decay(group["decay"])
        for name in ("lr_decay", "initial_accumulator_value", "eps"):
            check_range(name, group[name])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with its state."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for param in group["params"]:
            self.state[param] = self.initial_state(param, group)

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return a sum that starts at `initial_accumulator_value`."""
        start = group["initial_accumulator_value"]
        return {"step": counter(), "sum": torch.full_like(param, start, requires_grad=False)}

    def rule(self, group: Mapping[str, Any], state: Mapping[str, Tensor], first: bool) -> Applied:
        """Return `rules.adagrad` with the options of the group."""
        return functools.partial(adagrad, **self.shared(group, state)), ("sum",)

    def shared(self, group: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the options that both rules take."""
        names = ("lr", "lr_decay", "weight_decay", "eps", "maximize")
        return {name: group[name] for name in names} | {
            "step": float(state["step"]),
            "decay": Decay(group["decay"]),
        }


class RowWiseAdagrad(Adagrad):
    """Adagrad with one rate a row, see `rules.rowwise_adagrad`. State: `step`, and `sum`, (rows, 1).

    As in torchrec, weight decay is L2 and on every row of a dense gradient; FBGEMM's is
    ``decay="decoupled"`` or ``"l2"`` with ``rows="nonzero"``. Sparse gradients update the rows they list.
    """

    tables_only = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        decay: Decay | str = Decay.L2,
        rows: Rows | str = Rows.GIVEN,
        max_norm: float | None = None,
        error_if_nonfinite: bool = False,
    ) -> None:
        RuleOptimizer.__init__(
            self,
            params,
            lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
            maximize=maximize,
            decay=decay,
            rows=rows,
            max_norm=max_norm,
            error_if_nonfinite=error_if_nonfinite,
        )

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Refuse options out of range."""
        super().check_options(group)
        if group["max_norm"] is not None:
            check_range("max_norm", group["max_norm"])

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return a sum a row that starts at `initial_accumulator_value`."""
        start = group["initial_accumulator_value"]
        return {"step": counter(), "sum": param.new_full((len(param), 1), start)}

    def rule(self, group: Mapping[str, Any], state: Mapping[str, Tensor], first: bool) -> Applied:
        """Return `rules.rowwise_adagrad` with the options of the group."""
        options = self.shared(group, state) | {"max_norm": group["max_norm"]}
        return functools.partial(rowwise_adagrad, **options), ("sum",)
