"""Adagrad and row-wise Adagrad."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from keyedopt.fused.dense.initial_state import counter, full_state, row_state
from keyedopt.fused.option_checks import check_range
from keyedopt.fused.row_optimizer import RowOptimizer
from keyedopt.reference.rules.options import Decay, Rows

__all__ = ["Adagrad", "RowWiseAdagrad"]


class Adagrad(RowOptimizer):
    r"""Adagrad. State, from construction on: `step`, and `sum` of all squares, as the parameter.

    .. math::
        s \leftarrow s + g^2, \qquad
        w \leftarrow w - \frac{\gamma}{1 + (t - 1) \eta} \frac{g}{\sqrt{s} + \epsilon}
    """

    algorithm = "adagrad"
    quick = True

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

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sum that starts at `initial_accumulator_value`."""
        start = group["initial_accumulator_value"]
        return {"step": counter(param), "sum": full_state(param, start)}


class RowWiseAdagrad(Adagrad):
    r"""Adagrad with one rate a row. State: `step`, and `sum` of the mean squares of the row, (rows, 1).

    As in torchrec, weight decay is L2 and on every row of a dense gradient; FBGEMM's is
    ``decay="decoupled"`` or ``"l2"`` with ``rows="nonzero"``. Sparse gradients update the rows they list.
    """

    algorithm = "rowwise_adagrad"
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
        RowOptimizer.__init__(
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

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sum a row that starts at `initial_accumulator_value`."""
        start = group["initial_accumulator_value"]
        return {"step": counter(param), "sum": row_state(param, start, columns=1)}
