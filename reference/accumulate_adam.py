"""Adam and AdamW that accumulate the gradients of several backward passes."""

from typing import Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from keyedopt.reference.accumulating import Accumulating
from keyedopt.reference.adam import Adam
from keyedopt.reference.adamw import AdamW
from keyedopt.reference.rules.options import BiasCorrection, Decay, EpsPlacement, Rows
from keyedopt.reference.saved_groups import TorchAdamOptions

__all__ = ["AccumulateAdam", "AccumulateAdamW"]


class AccumulateAdam(Accumulating, Adam):
    """`Adam` over windows of backward passes.

    Args:
        params: parameters, or groups of parameters.
        use_accumulate: whether to accumulate; without, ``accumulate_step`` is ignored.
        accumulate_step: the number of steps in a window, at least 1.
        lr, betas, eps, weight_decay: as in `Adam`.
        maximize, decay, eps_placement, bias_correction, rows: as in `Adam`.
        error_if_nonfinite, torch_options: as in `Adam`.

    Raises:
        TypeError: ``use_accumulate`` is not a bool.
        ValueError: another option is out of range, or a parameter is not of floats.

    >>> import torch
    >>> from keyedopt.reference import AccumulateAdam
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = AccumulateAdam([weight], lr=0.25, use_accumulate=True, accumulate_step=2)
    >>> for _ in range(4):
    ...     weight.grad = torch.ones(1)
    ...     optimizer.step()
    ...     print(f"{weight.item():.4f}")
    1.0000
    0.7500
    0.7500
    0.5000
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        use_accumulate: bool = False,
        accumulate_step: int = 1,
        maximize: bool = False,
        decay: Decay | str = Decay.L2,
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
            use_accumulate=use_accumulate,
            accumulate_step=accumulate_step,
            maximize=maximize,
            decay=decay,
            eps_placement=eps_placement,
            bias_correction=bias_correction,
            rows=rows,
            error_if_nonfinite=error_if_nonfinite,
            **torch_options,
        )


class AccumulateAdamW(Accumulating, AdamW):
    """`AdamW` over windows of backward passes, which decays once in a window.

    Args:
        params: parameters, or groups of parameters.
        use_accumulate: whether to accumulate; without, ``accumulate_step`` is ignored.
        accumulate_step: the number of steps in a window, at least 1.
        lr, betas, eps, weight_decay: as in `AdamW`.
        maximize, eps_placement, bias_correction, rows, error_if_nonfinite, torch_options: as in `AdamW`.

    Raises:
        TypeError: ``use_accumulate`` is not a bool.
        ValueError: another option is out of range, or a parameter is not of floats.

    >>> import torch
    >>> from keyedopt.reference import AccumulateAdamW
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = AccumulateAdamW([weight], lr=0.25, use_accumulate=True, accumulate_step=2)
    >>> for _ in range(4):
    ...     weight.grad = torch.ones(1)
    ...     optimizer.step()
    ...     print(f"{weight.item():.4f}")
    1.0000
    0.7475
    0.7475
    0.4956
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        use_accumulate: bool = False,
        accumulate_step: int = 1,
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
            use_accumulate=use_accumulate,
            accumulate_step=accumulate_step,
            maximize=maximize,
            eps_placement=eps_placement,
            bias_correction=bias_correction,
            rows=rows,
            error_if_nonfinite=error_if_nonfinite,
            **torch_options,
        )
