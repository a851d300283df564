"""Adam and AdamW: running means of the gradient and of its square."""

from torch import Tensor

from keyedopt.reference.rules import arithmetic
from keyedopt.reference.rules.arithmetic import ascend, bias_correction, decayed_grad, narrow, quotient, widen
from keyedopt.reference.rules.options import Decay, EpsPlacement


def adam(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int | float | Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
    decay: Decay = Decay.L2,
    eps_placement: EpsPlacement = EpsPlacement.INSIDE_DENOMINATOR,
    maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Step along the mean gradient divided by the root of the mean square, both with bias correction.

    .. math::
        g &\leftarrow g + \lambda w \qquad \text{(L2)} \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        \hat m &= m / (1 - \beta_1^t), \qquad \hat v = v / (1 - \beta_2^t) \\
        w &\leftarrow w - \gamma \, \hat m / (\sqrt{\hat v} + \epsilon)
            \;[\, - \gamma \lambda w \text{ (decoupled: AdamW)}]

    Args:
        weight: (R, D), or any shape.
        grad: as `weight`; each row once, duplicates summed.
        exp_avg: m, as `weight`.
        exp_avg_sq: v, as `weight`.
        step: t of this step, from 1: one count, or one for each row (R,).
        lr: γ.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: λ.
        decay: how λ is applied; L2 in torch's Adam, decoupled in AdamW and in FBGEMM's ADAM.
        eps_placement: √v̂ + ε, or √v + ε before bias correction.
        maximize: step along the gradient, not against it.

    Returns:
        weight, exp_avg, exp_avg_sq, in their own dtypes, computed in float32 at least.

    With ε = 0 the square of a small gradient may underflow in the dtype of v (in float16, below about 5e-3).
    Then m / 0 makes the weight infinite at the next step, and decay may make it NaN permanently.

    Source: Kingma and Ba 2015; Loshchilov and Hutter 2019 (AdamW); torch.optim.Adam.

    >>> import torch
    >>> zero = torch.zeros(1)
    >>> adam(torch.ones(1), torch.tensor([0.5]), zero, zero, step=1, lr=0.1, betas=(0.9, 0.999), eps=0.0)[0]
    tensor([0.9000])
    """
    w = widen(weight)
    g = decayed_grad(ascend(grad, maximize), w, weight_decay, decay)
    m, v, direction = moments(
        g, g.square(), exp_avg, exp_avg_sq, step=step, betas=betas, eps=eps, eps_placement=eps_placement
    )
    w = w - lr * (direction + arithmetic.decoupled(w, weight_decay, decay))
    return narrow(w, weight), narrow(m, exp_avg), narrow(v, exp_avg_sq)


def moments(
    g: Tensor,
    square: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int | float | Tensor,
    betas: tuple[float, float],
    eps: float,
    eps_placement: EpsPlacement = EpsPlacement.INSIDE_DENOMINATOR,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return both updated running means, and the direction of the step, for all variants of Adam.

    `square` is g², or a column with its mean over each row; `exp_avg_sq` has as many elements.
    """
    beta1, beta2 = betas
    m = beta1 * widen(exp_avg) + (1 - beta1) * g
    v = beta2 * widen(exp_avg_sq).reshape(square.shape) + (1 - beta2) * square
    correction1, correction2 = bias_correction(beta1, step, g), bias_correction(beta2, step, g)
    if eps_placement is EpsPlacement.INSIDE_DENOMINATOR:
        return m, v, quotient(m / correction1, (v / correction2).sqrt() + eps)
    return m, v, quotient(m, v.sqrt() + eps) * (correction2**0.5 / correction1)
