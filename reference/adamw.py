"""Adam with decoupled weight decay."""

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from keyedopt.reference.adam import Adam
from keyedopt.reference.option_checks import as_plain
from keyedopt.reference.rules.options import BiasCorrection, Decay, EpsPlacement, Rows
from keyedopt.reference.saved_groups import TorchAdamOptions

__all__ = ["AdamW"]


class AdamW(Adam):
    r"""Adam with decoupled weight decay: `rules.adam`.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        w &\leftarrow w - \gamma \left( \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}
            + \lambda w \right)

    State, from the first step on: that of `Adam`.

    Args:
        params: parameters, or groups of parameters.
        lr: the learning rate γ, at least 0; a tensor with one element is kept, and read at each step.
        betas: β₁ and β₂, each in [0, 1).
        eps: ε, at least 0.
        weight_decay: λ, at least 0.
        maximize, eps_placement, bias_correction, rows, error_if_nonfinite: as in `Adam`.
        torch_options: as in `Adam`; ``decoupled_weight_decay`` may only be True.

    Raises:
        ValueError: an option is out of range, also in a group, or a parameter is not of floats.

    Source: Loshchilov and Hutter 2019; torch.optim.AdamW.

    >>> import torch
    >>> from keyedopt.reference import AdamW
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = AdamW([weight], lr=0.5, weight_decay=0.1)
    >>> for _ in range(3):
    ...     weight.grad = 2 * weight.detach()  # of the loss w²
    ...     optimizer.step()
    ...     print(f"{weight.item():.4f}")
    0.4500
    -0.0307
    -0.3743
    """

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a checkpoint of Adam leaves AdamW what it is, as in torch
            group["decay"] = Decay.DECOUPLED.value

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Raise ValueError if an option is out of range, or is another decay."""
        super().check_options(group)
        if Decay(group["decay"]) is not Decay.DECOUPLED:
            raise ValueError(
                f"decay of AdamW must be 'decoupled', not {as_plain(group['decay'])!r}: Adam has the others"
            )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        eps_placement: EpsPlacement | str = EpsPlacement.INSIDE_DENOMINATOR,
        bias_correction: BiasCorrection | str = BiasCorrection.GLOBAL,
        rows: Rows | str = Rows.GIVEN,
        error_if_nonfinite: bool = False,
        **torch_options: Unpack[TorchAdamOptions],
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            maximize=maximize,
            decay=Decay.DECOUPLED,
            eps_placement=eps_placement,
            bias_correction=bias_correction,
            rows=rows,
            error_if_nonfinite=error_if_nonfinite,
            **torch_options,
        )
