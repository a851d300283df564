"""Stochastic gradient descent, with momentum."""

from torch import Tensor

from keyedopt.reference.rules.arithmetic import ascend, decayed_grad, decoupled, narrow, widen
from keyedopt.reference.rules.options import Decay


def sgd(
    weight: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None = None,
    *,
    lr: float | Tensor,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    first: bool = False,
    weight_decay: float = 0.0,
    decay: Decay = Decay.L2,
    maximize: bool = False,
) -> tuple[Tensor, ...]:
    r"""Step along the gradient, or along its running sum with momentum.

    .. math::
        g &\leftarrow g + \lambda w \qquad \text{(L2)} \\
        b &\leftarrow \mu b + (1 - \tau) g, \qquad b \leftarrow g \text{ in the first step} \\
        w &\leftarrow w - \gamma b, \qquad w - \gamma (g + \mu b) \text{ (Nesterov)}

    Args:
        weight: (R, D), or any shape.
        grad: as `weight`; each row once, duplicates summed.
        momentum_buffer: b, as `weight`; None without momentum.
        lr: γ.
        momentum: μ.
        dampening: τ.
        nesterov: use Nesterov momentum.
        first: whether this is the first step, so that b ← g.
        weight_decay: λ.
        decay: how λ is applied.
        maximize: step along the gradient, not against it.

    Returns:
        weight, and momentum_buffer if one was given; in their own dtypes, computed in float32 at least.

    Source: torch.optim.SGD. FBGEMM's exact SGD has neither momentum nor decay.

    >>> import torch
    >>> sgd(torch.tensor([1.0]), torch.tensor([0.5]), lr=0.1)[0]
    tensor([0.9500])
    """
    w = widen(weight)
    g = decayed_grad(ascend(grad, maximize), w, weight_decay, decay)
    if momentum_buffer is None:
        return (narrow(w - lr * (g + decoupled(w, weight_decay, decay)), weight),)
    b = g if first else momentum * widen(momentum_buffer) + (1 - dampening) * g
    direction = g + momentum * b if nesterov else b
    w = w - lr * (direction + decoupled(w, weight_decay, decay))
    return narrow(w, weight), narrow(b, momentum_buffer)
