"""The norm of tiny gradients is 0.

The norm is computed in float32 for gradients of float32 and bfloat16, and in float64 for those of float64,
without a scale. The squares of elements below about 1e-23, or 1e-162, are 0 there, and so is the norm that a
dashboard shows: as if no gradient had arrived.

Clauses: CLIP-088.
"""

import functools
import sys

import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

param = torch.nn.Parameter(torch.zeros(4))
param.grad = torch.full((4,), 1e-25)
optimizer = GradientClippingOptimizer(
    KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=1.0)),
    GradientClipping.NORM,
    max_gradient=1.0,
)
norm = float(optimizer.compute_total_grad_norm()[0])
defect = not norm
print(f"{'defect' if defect else 'fixed'}: expected a norm of 2e-25, seen {norm}")
sys.exit(1 if defect else 0)
