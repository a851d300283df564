"""Row-wise Adagrad: one learning rate for each row."""

from torch import Tensor

from keyedopt.reference.rules import arithmetic
from keyedopt.reference.rules.arithmetic import ascend, column, decayed_grad, narrow, quotient, widen
from keyedopt.reference.rules.options import Decay


def rowwise_adagrad(
    weight: Tensor,
    grad: Tensor,
    state_sum: Tensor,
    *,
    lr: float | Tensor,
    eps: float,
    step: int | float | Tensor = 1,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    decay: Decay = Decay.L2,
    max_norm: float | None = None,
    maximize: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Divide the step of a row by the root of the sum of its mean squared gradients so far.

    .. math::
        g &\leftarrow g + \lambda w \qquad \text{(L2)} \\
        s &\leftarrow s + \tfrac{1}{D} \sum_d g_d^2 \\
        w &\leftarrow w - \frac{\gamma}{1 + (t - 1) \eta} \frac{g}{\sqrt{s} + \epsilon}
            \;[\, - \gamma \lambda w \text{ (decoupled)}] \\
        w &\leftarrow w \cdot \min(1, \text{max\_norm} / \lVert w \rVert)

    Args:
        weight: (R, D).
        grad: (R, D); each row once, duplicates summed.
        state_sum: s, (R,) in FBGEMM or (R, 1) in torchrec.
        lr: γ.
        eps: ε; 1e-10 in torchrec, 1e-8 in FBGEMM.
        step: t of this step, from 1.
        lr_decay: η; FBGEMM has none.
        weight_decay: λ.
        decay: how λ is applied. torchrec has L2 on every row; FBGEMM has each variant, on the rows with a
            gradient.
        max_norm: largest norm of a row after the step; None for no limit.
        maximize: step along the gradient, not against it.

    Returns:
        weight and state_sum, in their own dtypes and shapes, computed in float32 at least.

    Source: torchrec.optim.RowWiseAdagrad; FBGEMM's EXACT_ROWWISE_ADAGRAD.

    >>> import torch
    >>> rowwise_adagrad(torch.ones(1, 2), torch.tensor([[0.6, 0.8]]), torch.zeros(1), lr=0.1, eps=0.0)
    (tensor([[0.9151, 0.8869]]), tensor([0.5000]))
    """
    w = widen(weight)
    g = decayed_grad(ascend(grad, maximize), w, weight_decay, decay)
    s = column(widen(state_sum)) + arithmetic.row_mean_square(g)
    decayed_lr = lr / (1 + (step - 1) * lr_decay)
    w = w - decayed_lr * quotient(g, s.sqrt() + eps) - lr * arithmetic.decoupled(w, weight_decay, decay)
    return narrow(arithmetic.limit_norm(w, max_norm), weight), narrow(s, state_sum)
