"""Adam, and the base class of the optimizers with the same two moments."""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from keyedopt.reference import rules
from keyedopt.reference.option_checks import check_betas, check_range
from keyedopt.reference.rule_optimizer import Applied, RuleOptimizer
from keyedopt.reference.rules.options import BiasCorrection, Decay, EpsPlacement, Rows
from keyedopt.reference.saved_groups import TorchAdamOptions, decay_of

__all__ = ["Adam"]


class AdamLike(RuleOptimizer):
    """An optimizer with the moments `exp_avg` and `exp_avg_sq` of the gradient.

    State, from the first step on: the moments, and `step`: one count, or (rows,) with
    ``bias_correction="per_row"``.
    """

    #: The rule.
    function: Callable[..., tuple[Tensor, Tensor, Tensor]]
    #: Whether the second moment has one number for each row.
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
        """Raise ValueError if an option is out of range."""
        super().check_options(group)
        Decay(group["decay"])
        BiasCorrection(group["bias_correction"])
        check_betas(group["betas"])
        check_range("eps", group["eps"])

    def initial_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return moments of zero, and a count of zero."""
        count = self.count_state(param)
        if BiasCorrection(group["bias_correction"]) is BiasCorrection.PER_ROW:
            count = self.row_state(param, dtype=torch.float64)
        square = self.row_state(param) if self.partial_rowwise else self.full_state(param)
        return {"step": count, "exp_avg": self.full_state(param), "exp_avg_sq": square}

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the rule from those of `group`, all but `step`."""
        names = ("lr", "betas", "eps", "weight_decay", "maximize")
        return {name: group[name] for name in names} | {"decay": Decay(group["decay"])}

    def rule(self, group: Mapping[str, Any], state: Mapping[str, Any], first: bool) -> Applied:
        """Return the rule with the options of the group; step counts per row are one more state tensor."""
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


class Adam(AdamLike):
    r"""Adam: `rules.adam`. With ``decay="decoupled"`` it is AdamW.

    .. math::
        g &\leftarrow g + \lambda w \qquad \text{(L2)} \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        w &\leftarrow w - \gamma \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}
            \;[\, - \gamma \lambda w \text{ (decoupled)}]

    State, from the first step on: `step`, one count or (rows,); `exp_avg` and `exp_avg_sq`, as the parameter.

    Args:
        params: parameters, or groups of parameters.
        lr: the learning rate γ, at least 0; a tensor with one element is kept, and read at each step.
        betas: β₁ and β₂, each in [0, 1).
        eps: ε, at least 0.
        weight_decay: λ, at least 0.
        maximize: step along the gradient, not against it.
        decay: how λ is applied: ``"l2"``, ``"decoupled"`` (AdamW) or ``"none"``.
        eps_placement: where ε is added: ``"inside_denominator"``, as above, or ``"before_bias_correction"``
            (to √v).
        bias_correction: which steps t counts: ``"global"``, all of the parameter, or ``"per_row"``, those in
            which the row had a gradient.
        rows: which rows a step updates: ``"given"`` by the gradient, ``"all"`` or ``"nonzero"``.
        error_if_nonfinite: raise RuntimeError in `step` if a gradient contains inf or NaN.
        torch_options: ``foreach``, ``fused``, ``capturable``, ``differentiable``, ``amsgrad`` and
            ``decoupled_weight_decay`` of torch's class. The first two have no effect on results, the last is
            ``decay``, and the others raise an error if they are True.

    Raises:
        ValueError: an option is out of range, or a parameter is not of floats.

    Source: Kingma and Ba 2015; Loshchilov and Hutter 2019 (AdamW); torch.optim.Adam.

    >>> import torch
    >>> from keyedopt.reference import Adam
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = Adam([weight], lr=0.5)
    >>> for _ in range(3):
    ...     weight.grad = 2 * weight.detach()  # of the loss w²
    ...     optimizer.step()
    ...     print(f"{weight.item():.4f}")
    0.5000
    0.0339
    -0.3359
    """

    function = staticmethod(rules.adam)

    torch_options = TorchAdamOptions.__optional_keys__

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
        **torch_options: Unpack[TorchAdamOptions],
    ) -> None:
        if "decoupled_weight_decay" in torch_options:
            given = None if decay is Decay.L2 else decay
            decay = decay_of(torch_options["decoupled_weight_decay"], given)
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
            torch_options=torch_options,
            eps_placement=eps_placement,
        )

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if an option is out of range."""
        super().check_options(group)
        EpsPlacement(group["eps_placement"])

    def options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the rule from those of `group`, all but `step`."""
        return super().options(group) | {"eps_placement": EpsPlacement(group["eps_placement"])}
