"""Adagrad: one learning rate for each element."""

from torch import Tensor

from keyedopt.reference.rules.arithmetic import ascend, decayed_grad, decoupled, narrow, quotient, widen
from keyedopt.reference.rules.options import Decay


def adagrad(
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
    maximize: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Divide the step by the root of the sum of all squared gradients so far.

    .. math::
        g &\leftarrow g + \lambda w \qquad \text{(L2)} \\
        s &\leftarrow s + g^2 \\
        w &\leftarrow w - \frac{\gamma}{1 + (t - 1) \eta} \frac{g}{\sqrt{s} + \epsilon}

    Args:
        weight: (R, D), or any shape.
        grad: as `weight`; each row once, duplicates summed.
        state_sum: s, as `weight`.
        lr: γ.
        eps: ε; 1e-10 in torch, 1e-8 in FBGEMM.
        step: t of this step, from 1.
        lr_decay: η.
        weight_decay: λ; FBGEMM's Adagrad ignores it.
        decay: how λ is applied.
        maximize: step along the gradient, not against it.

    Returns:
        weight and state_sum, in their own dtypes, computed in float32 at least.

    Source: Duchi, Hazan and Singer 2011; torch.optim.Adagrad.

    >>> import torch
    >>> adagrad(torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([0.0]), lr=0.1, eps=0.0)
    (tensor([0.9000]), tensor([0.2500]))
    """
    w = widen(weight)
    g = decayed_grad(ascend(grad, maximize), w, weight_decay, decay)
    s = widen(state_sum) + g.square()
    decayed_lr = lr / (1 + (step - 1) * lr_decay)
    w = w - decayed_lr * quotient(g, s.sqrt() + eps) - lr * decoupled(w, weight_decay, decay)
    return narrow(w, weight), narrow(s, state_sum)
