"""LARS: momentum, with a learning rate proportional to the norm of the weight over that of the gradient."""

from torch import Tensor

from keyedopt.reference.rules.arithmetic import ascend, narrow, row_norm, trust_ratio, widen


def lars_sgd(
    weight: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    *,
    lr: float | Tensor,
    momentum: float,
    eta: float,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Scale the gradient of a row to a fraction of the norm of the row.

    .. math::
        a &= \gamma \frac{\eta \lVert w \rVert}{\lVert g \rVert + \lambda \lVert w \rVert} \\
        b &\leftarrow \mu b + a (g + \lambda w), \qquad w \leftarrow w - b

    The ratio is 1 (so a = γ) if its numerator or its denominator is zero. FBGEMM has no such special case.

    Args:
        weight: (R, D).
        grad: (R, D); each row once, duplicates summed.
        momentum_buffer: b, (R, D).
        lr: γ.
        momentum: μ.
        eta: η, the trust coefficient.
        weight_decay: λ.
        maximize: step along the gradient, not against it.

    Returns:
        weight and momentum_buffer, in their own dtypes, computed in float32 at least.

    Source: You, Gitman and Ginsburg 2017; FBGEMM's LARS_SGD. The norms in the paper are of a layer, here of a
        row.
    """
    w = widen(weight)
    g = ascend(grad, maximize)
    length = row_norm(w)
    a = lr * trust_ratio(eta * length, row_norm(g) + weight_decay * length)
    b = momentum * widen(momentum_buffer) + a * (g + weight_decay * w)
    return narrow(w - b, weight), narrow(b, momentum_buffer)
