"""The gradients of a closure are not clipped: clipping happens before the closure runs.

Training with `step(closure)`, which LBFGS needs and torch documents for every optimizer, is not clipped
although clipping is on; instead the old content of .grad is clipped. One bad batch ends the run that
clipping should have protected. The tracked norm is that of the old gradients, too.

Clauses: CLIP-019, CLIP-020, CLIP-021, CLIP-049, CLIP-064, CLIP-085, COMB-054.
"""

import functools
import sys

import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

param = torch.nn.Parameter(torch.zeros(2))
optimizer = GradientClippingOptimizer(
    KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=1.0)),
    GradientClipping.NORM,
    max_gradient=1.0,
)


def closure() -> torch.Tensor:
    """Evaluate a model with the gradient (30, 40)."""
    param.grad = None
    loss = (param * torch.tensor([30.0, 40.0])).sum()
    loss.backward()
    return loss


optimizer.step(closure)
moved = float(param.detach().norm())
defect = moved > 1.001
print(f"{'defect' if defect else 'fixed'}: expected a move of norm 1, seen {moved}")
sys.exit(1 if defect else 0)
