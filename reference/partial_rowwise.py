"""Adam and LAMB with one second moment for each row of a table."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from keyedopt.reference import rules
from keyedopt.reference.adam import AdamLike
from keyedopt.reference.option_checks import check_range
from keyedopt.reference.rule_optimizer import RuleOptimizer
from keyedopt.reference.rules.options import BiasCorrection, Decay, Rows

__all__ = ["PartialRowWiseAdam", "PartialRowWiseLAMB"]


class PartialAdamLike(AdamLike):
    """An optimizer of tables whose second moment has one number for each row; rows may be limited in norm."""

    tables_only = partial_rowwise = True
    row_states = ("exp_avg_sq",)

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
        max_norm: float | None = None,
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
            max_norm=max_norm,
            error_if_nonfinite=error_if_nonfinite,
        )

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if an option is out of range."""
        super().check_options(group)
        if group["max_norm"] is not None:
            check_range("max_norm", group["max_norm"])

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the rule from those of `group`, all but `step`."""
        return super().options(group) | {"max_norm": group["max_norm"]}


class PartialRowWiseAdam(PartialAdamLike):
    r"""Adam with one second moment for each row: `rules.partial_rowwise_adam`.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) \tfrac{1}{D} \sum_d g_d^2 \\
        w &\leftarrow w - \gamma \left( \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}
            + \lambda w \right) \\
        w &\leftarrow w \cdot \min(1, \text{max\_norm} / \lVert w \rVert)

    State, from the first step on: `step`, one count or (rows,); `exp_avg`, as the table; `exp_avg_sq`,
    (rows,).

    Args:
        params: tables (rows, width), or groups of tables.
        lr: the learning rate γ, at least 0; a tensor with one element is kept, and read at each step.
        betas: β₁ and β₂, each in [0, 1).
        eps: ε, at least 0.
        weight_decay: λ, at least 0.
        maximize: step along the gradient, not against it.
        decay: how λ is applied: ``"decoupled"``, ``"l2"`` or ``"none"``.
        bias_correction: which steps t counts: ``"global"``, all of the parameter, or ``"per_row"``, those in
            which the row had a gradient.
        rows: which rows a step updates: ``"given"`` by the gradient, ``"all"`` or ``"nonzero"``.
        max_norm: the largest norm of a row after its step, at least 0; None for no limit.
        error_if_nonfinite: raise RuntimeError in `step` if a gradient contains inf or NaN.

    Raises:
        ValueError: an option is out of range, or a parameter is not a table of floats.

    Source: FBGEMM's PARTIAL_ROWWISE_ADAM.

    >>> import torch
    >>> from keyedopt.reference import PartialRowWiseAdam
    >>> table = torch.nn.Parameter(torch.ones(2, 2))
    >>> optimizer = PartialRowWiseAdam([table], lr=0.5, betas=(0.5, 0.75))
    >>> table.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    >>> optimizer.step()
    >>> [[round(one, 4) for one in row] for row in table.tolist()]
    [[0.5757, 0.4343], [1.0, 1.0]]
    >>> optimizer.state[table]["exp_avg_sq"].tolist()
    [3.125, 0.0]
    """

    function = staticmethod(rules.partial_rowwise_adam)


class PartialRowWiseLAMB(PartialAdamLike):
    r"""LAMB with one second moment for each row: `rules.partial_rowwise_lamb`.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) \tfrac{1}{D} \sum_d g_d^2 \\
        r &= \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon} + \lambda w \\
        w &\leftarrow w - \gamma \frac{\lVert w \rVert}{\lVert r \rVert} r \\
        w &\leftarrow w \cdot \min(1, \text{max\_norm} / \lVert w \rVert)

    The ratio of the norms is 1 if either is zero.

    State, from the first step on: `step`, one count or (rows,); `exp_avg`, as the table; `exp_avg_sq`,
    (rows,).

    Args:
        params: tables (rows, width), or groups of tables.
        lr: the learning rate γ, at least 0; a tensor with one element is kept, and read at each step.
        betas: β₁ and β₂, each in [0, 1).
        eps: ε, at least 0.
        weight_decay: λ, at least 0.
        maximize: step along the gradient, not against it.
        decay: how λ is applied: ``"decoupled"``, ``"l2"`` or ``"none"``.
        bias_correction: which steps t counts: ``"global"``, all of the parameter, or ``"per_row"``, those in
            which the row had a gradient.
        rows: which rows a step updates: ``"given"`` by the gradient, ``"all"`` or ``"nonzero"``.
        max_norm: the largest norm of a row after its step, at least 0; None for no limit.
        error_if_nonfinite: raise RuntimeError in `step` if a gradient contains inf or NaN.

    Raises:
        ValueError: an option is out of range, or a parameter is not a table of floats.

    Source: FBGEMM's PARTIAL_ROWWISE_LAMB.

    >>> import torch
    >>> from keyedopt.reference import PartialRowWiseLAMB
    >>> table = torch.nn.Parameter(torch.ones(2, 2))
    >>> optimizer = PartialRowWiseLAMB([table], lr=0.5, betas=(0.5, 0.75))
    >>> table.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    >>> optimizer.step()
    >>> [[round(one, 4) for one in row] for row in table.tolist()]
    [[0.5757, 0.4343], [1.0, 1.0]]
    >>> optimizer.state[table]["exp_avg_sq"].tolist()
    [3.125, 0.0]
    """

    function = staticmethod(rules.partial_rowwise_lamb)
