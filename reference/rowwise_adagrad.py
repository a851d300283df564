"""Adagrad and row-wise Adagrad."""

import functools
from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from keyedopt.reference.option_checks import check_range
from keyedopt.reference.rule_optimizer import Applied, RuleOptimizer
from keyedopt.reference.rules import adagrad, rowwise_adagrad
from keyedopt.reference.rules.options import Decay, Rows
from keyedopt.reference.saved_groups import TorchOptions

__all__ = ["Adagrad", "RowWiseAdagrad"]


class Adagrad(RuleOptimizer):
    r"""Adagrad: `rules.adagrad`.

    .. math::
        g &\leftarrow g + \lambda w \qquad \text{(L2)} \\
        s &\leftarrow s + g^2, \qquad
        w \leftarrow w - \frac{\gamma}{1 + (t - 1) \eta} \frac{g}{\sqrt{s} + \epsilon}

    State, from construction on: `step`, and `sum`, as the parameter.

    Args:
        params: parameters, or groups of parameters.
        lr: the learning rate γ, at least 0; a tensor with one element is kept, and read at each step.
        lr_decay: η, at least 0.
        weight_decay: λ, at least 0.
        initial_accumulator_value: s before the first step, at least 0.
        eps: ε, at least 0.
        maximize: step along the gradient, not against it.
        decay: how λ is applied: ``"l2"``, ``"decoupled"`` or ``"none"``.
        rows: which rows a step updates: ``"given"`` by the gradient, ``"all"`` or ``"nonzero"``.
        error_if_nonfinite: raise RuntimeError in `step` if a gradient contains inf or NaN.
        torch_options: ``foreach``, ``fused`` and ``differentiable`` of torch's class. The first two have no
            effect on results; ``differentiable=True`` raises an error.

    Raises:
        ValueError: an option is out of range, or a parameter is not of floats.

    Source: Duchi, Hazan and Singer 2011; torch.optim.Adagrad.

    >>> import torch
    >>> from keyedopt.reference import Adagrad
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = Adagrad([weight], lr=0.5)
    >>> for _ in range(3):
    ...     weight.grad = 2 * weight.detach()  # of the loss w²
    ...     optimizer.step()
    ...     print(f"{weight.item():.4f}")
    0.5000
    0.2764
    0.1564
    """

    torch_options = TorchOptions.__optional_keys__

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
        **torch_options: Unpack[TorchOptions],
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
            torch_options=torch_options,
        )

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if an option is out of range."""
        super().check_options(group)
        Decay(group["decay"])
        for name in ("lr_decay", "initial_accumulator_value", "eps"):
            check_range(name, group[name])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and the state of its parameters; see `RuleOptimizer.add_param_group`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for param in group["params"]:
            self.state[param] = self.initial_state(param, group)

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a sum that starts at `initial_accumulator_value`."""
        start = group["initial_accumulator_value"]
        return {"step": self.count_state(param), "sum": self.full_state(param, start)}

    def rule(self, group: Mapping[str, Any], state: Mapping[str, Any], first: bool) -> Applied:
        """Return `rules.adagrad` with the options of the group."""
        return functools.partial(adagrad, **self.shared(group, state)), ("sum",)

    def shared(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of `group` and the count in `state` that both rules take."""
        names = ("lr", "lr_decay", "weight_decay", "eps", "maximize")
        return {name: group[name] for name in names} | {
            "step": float(state["step"]),
            "decay": Decay(group["decay"]),
        }


class RowWiseAdagrad(Adagrad):
    r"""Adagrad with one learning rate for each row: `rules.rowwise_adagrad`.

    .. math::
        g &\leftarrow g + \lambda w \qquad \text{(L2)} \\
        s &\leftarrow s + \tfrac{1}{D} \sum_d g_d^2, \qquad
        w \leftarrow w - \frac{\gamma}{1 + (t - 1) \eta} \frac{g}{\sqrt{s} + \epsilon}

    As in torchrec, weight decay is L2 and applies to every row of a dense gradient. FBGEMM's is
    ``decay="decoupled"`` or ``"l2"`` with ``rows="nonzero"``. Sparse gradients update the rows they list.

    State, from construction on: `step`, and `sum`, (rows, 1).

    Args:
        params: tables (rows, width), or groups of tables.
        lr: the learning rate γ, at least 0; a tensor with one element is kept, and read at each step.
        lr_decay: η, at least 0.
        weight_decay: λ, at least 0.
        initial_accumulator_value: s before the first step, at least 0.
        eps: ε, at least 0.
        maximize: step along the gradient, not against it.
        decay: how λ is applied: ``"l2"``, ``"decoupled"`` or ``"none"``.
        rows: which rows a step updates: ``"given"`` by the gradient, ``"all"`` or ``"nonzero"``.
        max_norm: the largest norm of a row after its step, at least 0; None for no limit.
        error_if_nonfinite: raise RuntimeError in `step` if a gradient contains inf or NaN.
        torch_options: ``foreach``, ``fused`` and ``differentiable`` of torch's class. The first two have no
            effect on results; ``differentiable=True`` raises an error.

    Raises:
        ValueError: an option is out of range, or a parameter is not a table of floats.

    Source: torchrec.optim.RowWiseAdagrad; FBGEMM's EXACT_ROWWISE_ADAGRAD.

    >>> import torch
    >>> from keyedopt.reference import RowWiseAdagrad
    >>> table = torch.nn.Parameter(torch.ones(2, 2))
    >>> optimizer = RowWiseAdagrad([table], lr=0.5)
    >>> table.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    >>> optimizer.step()
    >>> [[round(one, 4) for one in row] for row in table.tolist()]
    [[0.5757, 0.4343], [1.0, 1.0]]
    >>> optimizer.state[table]["sum"].tolist()
    [[12.5], [0.0]]
    """

    tables_only = True
    row_states = ("sum",)

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
        **torch_options: Unpack[TorchOptions],
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
            torch_options=torch_options,
        )

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if an option is out of range."""
        super().check_options(group)
        if group["max_norm"] is not None:
            check_range("max_norm", group["max_norm"])

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return one sum for each row, which starts at `initial_accumulator_value`."""
        start = group["initial_accumulator_value"]
        return {"step": self.count_state(param), "sum": self.row_state(param, 1, start=start)}

    def rule(self, group: Mapping[str, Any], state: Mapping[str, Any], first: bool) -> Applied:
        """Return `rules.rowwise_adagrad` with the options of the group."""
        options = self.shared(group, state) | {"max_norm": group["max_norm"]}
        return functools.partial(rowwise_adagrad, **options), ("sum",)
