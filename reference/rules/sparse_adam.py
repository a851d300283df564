"""SparseAdam: Adam for only the rows with a gradient."""

from torch import Tensor

from keyedopt.reference.rules.adam import adam
from keyedopt.reference.rules.options import Decay, EpsPlacement


def sparse_adam(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int | float | Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Adam without decay, with eps added before the bias correction.

    .. math::
        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        w &\leftarrow w - \gamma \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \frac{m}{\sqrt{v} + \epsilon}

    Args:
        weight: (R, D), only the rows with a gradient.
        grad: (R, D); each row once, duplicates summed.
        exp_avg: m, (R, D).
        exp_avg_sq: v, (R, D).
        step: t of this step, from 1; counts all steps of the parameter.
        lr: γ.
        betas: β₁ and β₂.
        eps: ε.
        maximize: step along the gradient, not against it.

    Returns:
        weight, exp_avg, exp_avg_sq, in their own dtypes, computed in float32 at least.

    Source: torch.optim.SparseAdam. Its documentation has the formula of Adam; its code adds eps before the
        bias
    correction.
    """
    return adam(
        weight,
        grad,
        exp_avg,
        exp_avg_sq,
        step=step,
        lr=lr,
        betas=betas,
        eps=eps,
        decay=Decay.NONE,
        eps_placement=EpsPlacement.BEFORE_BIAS_CORRECTION,
        maximize=maximize,
    )
