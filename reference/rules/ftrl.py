"""FTRL-Proximal: the weight is a function of the sum of all gradients, with L1 regularization."""

from torch import Tensor

from keyedopt.reference.rules.arithmetic import ascend, decayed_grad, narrow, quotient, widen
from keyedopt.reference.rules.options import Decay


def ftrl(
    weight: Tensor,
    grad: Tensor,
    accumulator: Tensor,
    linear: Tensor,
    *,
    lr: float | Tensor,
    lr_power: float = -0.5,
    l1: float = 0.0,
    l2: float = 0.0,
    l2_shrinkage: float = 0.0,
    beta: float = 0.0,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Solve for the weight that minimizes the regularized sum of all linearized losses so far.

    .. math::
        g &\leftarrow g + \lambda w, \qquad n' = n + g^2 \\
        z &\leftarrow z + g + 2 \lambda_s w - \frac{n'^{-p} - n^{-p}}{\gamma} w, \qquad n \leftarrow n' \\
        w &\leftarrow \frac{\operatorname{clip}(z, -\lambda_1, \lambda_1) - z}
            {(\beta + n^{-p}) / \gamma + 2 \lambda_2}

    The new weight depends on the old one only through z: an element whose z is within ±λ₁ becomes 0. So does
    the initial weight of an element whose first gradient is 0.

    Args:
        weight: (R, D), or any shape.
        grad: as `weight`; each row once, duplicates summed.
        accumulator: n, as `weight`, at least 0.
        linear: z, as `weight`.
        lr: γ, above 0.
        lr_power: p, at most 0; 0 for steps that do not become smaller.
        l1: λ₁.
        l2: λ₂, of the penalty λ₂‖w‖²; the λ₂ in the paper is twice as large.
        l2_shrinkage: λₛ, of the penalty λₛ‖w‖² of the loss, whose gradient does not enter n.
        beta: β.
        weight_decay: λ, L2: enters n, too.
        maximize: step along the gradient, not against it.

    Returns:
        weight, accumulator and linear, in their own dtypes, computed in float32 at least.

    Source: McMahan et al. 2013, algorithm 1; TensorFlow's ApplyFtrlV2 and tf.keras.optimizers.Ftrl.

    >>> import torch
    >>> zero = torch.zeros(1)
    >>> ftrl(zero, torch.tensor([0.5]), zero, zero, lr=0.1, l1=0.25)
    (tensor([-0.0500]), tensor([0.2500]), tensor([0.5000]))
    """
    w, n = widen(weight), widen(accumulator)
    g = decayed_grad(ascend(grad, maximize), w, weight_decay, Decay.L2)
    total = n + g.square()
    root = total**-lr_power
    z = widen(linear) + g + 2 * l2_shrinkage * w - (root - n**-lr_power) / lr * w
    w = quotient(z.clamp(-l1, l1) - z, (beta + root) / lr + 2 * l2)
    return narrow(w, weight), narrow(total, accumulator), narrow(z, linear)
