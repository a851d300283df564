"""NORM scales a tensor that is the gradient of two parameters twice.

The norm of both gradients is 5 * sqrt(2), and the factor 1 / (5 * sqrt(2)). The tensor is multiplied by it
once for each parameter, so the gradients after clipping have a norm of 0.14 instead of the bound 1.

Clauses: CLIP-038.
"""

import functools
import sys

import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

params = {key: torch.nn.Parameter(torch.zeros(2)) for key in ("a", "b")}
optimizer = GradientClippingOptimizer(
    KeyedOptimizerWrapper(params, functools.partial(torch.optim.SGD, lr=1.0)),
    GradientClipping.NORM,
    max_gradient=1.0,
)
params["a"].grad = params["b"].grad = torch.tensor([3.0, 4.0])
optimizer.step()
norm = float(torch.cat([param.detach() for param in params.values()]).norm())
defect = abs(norm - 1) > 1e-3
print(f"{'defect' if defect else 'fixed'}: expected a step of norm 1, seen {norm:.4f}")
sys.exit(1 if defect else 0)
