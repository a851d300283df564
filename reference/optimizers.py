"""SGD and LARS, and the optimizers that are placeholders in `torchrec.optim.optimizers`.

State has the dtype of the parameter; the computation is in float32 at least. Where libraries differ, an
argument selects the variant.
"""

import functools
from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from keyedopt.reference import rules
from keyedopt.reference.adam import Adam
from keyedopt.reference.adamw import AdamW
from keyedopt.reference.apply_optimizer_in_backward import in_backward_optimizer_filter
from keyedopt.reference.ftrl import Ftrl
from keyedopt.reference.lamb import LAMB
from keyedopt.reference.option_checks import check_range
from keyedopt.reference.partial_rowwise import PartialRowWiseAdam, PartialRowWiseLAMB
from keyedopt.reference.rowwise_adagrad import Adagrad
from keyedopt.reference.rule_optimizer import Applied, RuleOptimizer
from keyedopt.reference.rules.options import Decay, Rows
from keyedopt.reference.saved_groups import TorchOptions

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "LarsSGD",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "in_backward_optimizer_filter",
]


class SGD(RuleOptimizer):
    r"""Stochastic gradient descent, with momentum: `rules.sgd`.

    .. math::
        g &\leftarrow g + \lambda w \qquad \text{(L2)} \\
        b &\leftarrow \mu b + (1 - \tau) g, \qquad b \leftarrow g \text{ in the first step} \\
        w &\leftarrow w - \gamma b, \qquad w - \gamma (g + \mu b) \text{ (Nesterov)}

    State: `momentum_buffer`, as the parameter, from the first step on; none without momentum.

    Args:
        params: parameters, or groups of parameters.
        lr: the learning rate γ, at least 0; a tensor with one element is kept, and read at each step.
        momentum: μ, at least 0.
        dampening: τ, at least 0.
        weight_decay: λ, at least 0.
        nesterov: use Nesterov momentum; needs a momentum above 0 and no dampening.
        maximize: step along the gradient, not against it.
        decay: how λ is applied: ``"l2"``, ``"decoupled"`` or ``"none"``.
        rows: which rows a step updates: ``"given"`` by the gradient, ``"all"`` or ``"nonzero"``.
        error_if_nonfinite: raise RuntimeError in `step` if a gradient contains inf or NaN.
        torch_options: ``foreach``, ``fused`` and ``differentiable`` of torch's class. The first two have no
            effect on results; ``differentiable=True`` raises an error.

    Raises:
        ValueError: an option is out of range, or a parameter is not of floats.

    Source: torch.optim.SGD.

    >>> import torch
    >>> from keyedopt.reference import SGD
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = SGD([weight], lr=0.25, momentum=0.5)
    >>> for _ in range(3):
    ...     weight.grad = 2 * weight.detach()  # of the loss w²
    ...     optimizer.step()
    ...     print(f"{weight.item():.4f}")
    0.5000
    0.0000
    -0.2500
    """

    torch_options = TorchOptions.__optional_keys__

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
        **torch_options: Unpack[TorchOptions],
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
            torch_options=torch_options,
        )

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if an option is out of range."""
        super().check_options(group)
        Decay(group["decay"])
        check_range("momentum", group["momentum"])
        check_range("dampening", group["dampening"])
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ValueError("nesterov needs a momentum above 0 and a dampening of 0")

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a buffer of zeros, or nothing without momentum."""
        return {"momentum_buffer": self.full_state(param)} if group["momentum"] else {}

    def rule(self, group: Mapping[str, Any], state: Mapping[str, Any], first: bool) -> Applied:
        """Return `rules.sgd` with the options of the group."""
        names = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "maximize")
        options = {name: group[name] for name in names}
        buffers = tuple(name for name in state if name == "momentum_buffer")
        return functools.partial(rules.sgd, first=first, decay=Decay(group["decay"]), **options), buffers


class LarsSGD(RuleOptimizer):
    r"""LARS with the norms of rows: `rules.lars_sgd`.

    .. math::
        b \leftarrow \mu b + \gamma \frac{\eta \lVert w \rVert}{\lVert g \rVert + \lambda \lVert w \rVert}
        (g + \lambda w), \qquad w \leftarrow w - b

    State: `momentum_buffer`, as the parameter, from the first step on.

    Args:
        params: tables (rows, width), or groups of tables.
        lr: the learning rate γ, at least 0; a tensor with one element is kept, and read at each step.
        momentum: μ, at least 0.
        weight_decay: λ, at least 0.
        eta: the trust coefficient η, at least 0.
        maximize: step along the gradient, not against it.
        rows: which rows a step updates: ``"given"`` by the gradient, ``"all"`` or ``"nonzero"``.
        error_if_nonfinite: raise RuntimeError in `step` if a gradient contains inf or NaN.

    Raises:
        ValueError: an option is out of range, or a parameter is not a table of floats.

    Source: You, Gitman and Ginsburg 2017; FBGEMM's LARS_SGD.

    >>> import torch
    >>> from keyedopt.reference import LarsSGD
    >>> table = torch.nn.Parameter(torch.ones(2, 2))
    >>> optimizer = LarsSGD([table], lr=0.5, eta=0.1)
    >>> table.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    >>> optimizer.step()
    >>> [[round(one, 4) for one in row] for row in table.tolist()]
    [[0.9576, 0.9434], [1.0, 1.0]]
    """

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
        """Raise ValueError if an option is out of range."""
        super().check_options(group)
        check_range("momentum", group["momentum"])
        check_range("eta", group["eta"])

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a buffer of zeros."""
        return {"momentum_buffer": self.full_state(param)}

    def rule(self, group: Mapping[str, Any], state: Mapping[str, Any], first: bool) -> Applied:
        """Return `rules.lars_sgd` with the options of the group."""
        names = ("lr", "momentum", "eta", "weight_decay", "maximize")
        return functools.partial(rules.lars_sgd, **{name: group[name] for name in names}), (
            "momentum_buffer",
        )
