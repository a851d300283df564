"""Partial row-wise LAMB: LAMB with one second moment for each row."""

from torch import Tensor

from keyedopt.reference.rules import arithmetic
from keyedopt.reference.rules.adam import moments
from keyedopt.reference.rules.arithmetic import ascend, decayed_grad, narrow, row_norm, trust_ratio, widen
from keyedopt.reference.rules.options import Decay


def partial_rowwise_lamb(
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
    decay: Decay = Decay.DECOUPLED,
    max_norm: float | None = None,
    maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Scale the step of a row to the norm of the row.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) \tfrac{1}{D} \sum_d g_d^2 \\
        r &= \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon} + \lambda w \\
        w &\leftarrow w - \gamma \frac{\lVert w \rVert}{\lVert r \rVert} r \\
        w &\leftarrow w \cdot \min(1, \text{max\_norm} / \lVert w \rVert)

    The ratio of the norms is 1 if either is zero: so a row of zeros changes, and a row whose direction is
    zero does not. FBGEMM has no such special case.

    Args:
        weight: (R, D).
        grad: (R, D); each row once, duplicates summed.
        exp_avg: m, (R, D).
        exp_avg_sq: v, (R,) or (R, 1).
        step: t of this step, from 1: one count, or one for each row (R,).
        lr: γ.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: λ.
        decay: how λ is applied; L2 adds λw to g instead.
        max_norm: largest norm of a row after the step; None for no limit.
        maximize: step along the gradient, not against it.

    Returns:
        weight, exp_avg, exp_avg_sq, in their own dtypes and shapes, computed in float32 at least.

    Source: FBGEMM's PARTIAL_ROWWISE_LAMB. The norms in the paper are of a layer, here of a row.
    """
    w = widen(weight)
    g = decayed_grad(ascend(grad, maximize), w, weight_decay, decay)
    m, v, direction = moments(
        g, arithmetic.row_mean_square(g), exp_avg, exp_avg_sq, step=step, betas=betas, eps=eps
    )
    r = direction + arithmetic.decoupled(w, weight_decay, decay)
    w = w - lr * trust_ratio(row_norm(w), row_norm(r)) * r
    return narrow(arithmetic.limit_norm(w, max_norm), weight), narrow(m, exp_avg), narrow(v, exp_avg_sq)
