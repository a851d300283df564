"""Optimizers that accumulate the gradients of several backward passes, as in Rec SDK Torch.

With ``use_accumulate`` each step stores the current gradients, and each ``accumulate_step``-th step applies
one update with the sum of the window, which is not divided by its length. So N micro-batches equal one batch
of their sum, and step counts increase once in a window. Without ``use_accumulate`` the optimizers are `SGD`,
`Adagrad`, `RowWiseAdagrad`, `Adam` and `AdamW`. Rec SDK Torch has neither `AccumulateRowWiseAdagrad` nor
`AccumulateAdamW`.

Differences from Rec SDK Torch: the window is part of the state, so a checkpoint in the middle of a window
loses nothing; and the sum over all gradients of the window is taken in float64 and rounded once, so its error
does not grow with their number (Rec SDK Torch documents 10,000 gradients for a precision of 0.01 %).
"""

from typing import Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from keyedopt.reference.accumulate_adam import AccumulateAdam, AccumulateAdamW
from keyedopt.reference.accumulating import Accumulating
from keyedopt.reference.optimizers import SGD, Adagrad
from keyedopt.reference.rowwise_adagrad import RowWiseAdagrad
from keyedopt.reference.rules.options import Decay, Rows
from keyedopt.reference.saved_groups import TorchOptions

__all__ = [
    "AccumulateAdagrad",
    "AccumulateAdam",
    "AccumulateAdamW",
    "AccumulateRowWiseAdagrad",
    "AccumulateSGD",
]


class AccumulateSGD(Accumulating, SGD):
    """`SGD` over windows of backward passes.

    Args:
        params: parameters, or groups of parameters.
        use_accumulate: whether to accumulate; without, ``accumulate_step`` is ignored.
        accumulate_step: the number of steps in a window, at least 1.
        lr, momentum, dampening, weight_decay, nesterov: as in `SGD`.
        maximize, decay, rows, error_if_nonfinite, torch_options: as in `SGD`.

    Raises:
        TypeError: ``use_accumulate`` is not a bool.
        ValueError: another option is out of range, or a parameter is not of floats.

    >>> import torch
    >>> from keyedopt.reference import AccumulateSGD
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = AccumulateSGD([weight], lr=0.5, use_accumulate=True, accumulate_step=2)
    >>> for _ in range(4):
    ...     weight.grad = torch.ones(1)
    ...     optimizer.step()
    ...     print(f"{weight.item():.4f}")
    1.0000
    0.0000
    0.0000
    -1.0000
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        use_accumulate: bool = False,
        accumulate_step: int = 1,
        maximize: bool = False,
        decay: Decay | str = Decay.L2,
        rows: Rows | str = Rows.GIVEN,
        error_if_nonfinite: bool = False,
        **torch_options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            use_accumulate=use_accumulate,
            accumulate_step=accumulate_step,
            maximize=maximize,
            decay=decay,
            rows=rows,
            error_if_nonfinite=error_if_nonfinite,
            **torch_options,
        )


class AccumulateAdagrad(Accumulating, Adagrad):
    """`Adagrad` over windows of backward passes.

    Args:
        params: parameters, or groups of parameters.
        use_accumulate: whether to accumulate; without, ``accumulate_step`` is ignored.
        accumulate_step: the number of steps in a window, at least 1.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps: as in `Adagrad`.
        maximize, decay, rows, error_if_nonfinite, torch_options: as in `Adagrad`.

    Raises:
        TypeError: ``use_accumulate`` is not a bool.
        ValueError: another option is out of range, or a parameter is not of floats.

    >>> import torch
    >>> from keyedopt.reference import AccumulateAdagrad
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> optimizer = AccumulateAdagrad([weight], lr=0.5, use_accumulate=True, accumulate_step=2)
    >>> for _ in range(4):
    ...     weight.grad = torch.ones(1)
    ...     optimizer.step()
    ...     print(f"{weight.item():.4f}")
    1.0000
    0.5000
    0.5000
    0.1464
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        use_accumulate: bool = False,
        accumulate_step: int = 1,
        maximize: bool = False,
        decay: Decay | str = Decay.L2,
        rows: Rows | str = Rows.GIVEN,
        error_if_nonfinite: bool = False,
        **torch_options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(
            params,
            lr,
            lr_decay,
            weight_decay,
            initial_accumulator_value,
            eps,
            use_accumulate=use_accumulate,
            accumulate_step=accumulate_step,
            maximize=maximize,
            decay=decay,
            rows=rows,
            error_if_nonfinite=error_if_nonfinite,
            **torch_options,
        )


class AccumulateRowWiseAdagrad(Accumulating, RowWiseAdagrad):
    """`RowWiseAdagrad` over windows of backward passes.

    Args:
        params: parameters, or groups of parameters.
        use_accumulate: whether to accumulate; without, ``accumulate_step`` is ignored.
        accumulate_step: the number of steps in a window, at least 1.
        lr, lr_decay, weight_decay, initial_accumulator_value, eps: as in `RowWiseAdagrad`.
        maximize, decay, rows, max_norm, error_if_nonfinite, torch_options: as in `RowWiseAdagrad`.

    Raises:
        TypeError: ``use_accumulate`` is not a bool.
        ValueError: another option is out of range, or a parameter is not of floats.

    >>> import torch
    >>> from keyedopt.reference import AccumulateRowWiseAdagrad
    >>> weight = torch.nn.Parameter(torch.ones(1, 2))
    >>> optimizer = AccumulateRowWiseAdagrad([weight], lr=0.5, use_accumulate=True, accumulate_step=2)
    >>> for _ in range(4):
    ...     weight.grad = torch.ones(1, 2)
    ...     optimizer.step()
    ...     print(f"{weight[0, 0].item():.4f}")
    1.0000
    0.5000
    0.5000
    0.1464
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        use_accumulate: bool = False,
        accumulate_step: int = 1,
        maximize: bool = False,
        decay: Decay | str = Decay.L2,
        rows: Rows | str = Rows.GIVEN,
        max_norm: float | None = None,
        error_if_nonfinite: bool = False,
        **torch_options: Unpack[TorchOptions],
    ) -> None:
        super().__init__(
            params,
            lr,
            lr_decay,
            weight_decay,
            initial_accumulator_value,
            eps,
            use_accumulate=use_accumulate,
            accumulate_step=accumulate_step,
            maximize=maximize,
            decay=decay,
            rows=rows,
            max_norm=max_norm,
            error_if_nonfinite=error_if_nonfinite,
            **torch_options,
        )
