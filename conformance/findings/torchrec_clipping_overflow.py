"""Finite gradients are set to zero if their norm overflows their dtype.

The norm is computed in the dtype of the gradients: above 65504 in float16, or with squares above 3e38 in
float32, it is infinite and the factor is 0. The step does nothing exactly when clipping is needed, and the
reported norm is infinite although all gradients are finite.

Clauses: CLIP-015, CLIP-050, CLIP-054.
"""

import functools
import sys

import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
param.grad = torch.full((4,), 4e4, dtype=torch.float16)
optimizer = GradientClippingOptimizer(
    KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=1.0)),
    GradientClipping.NORM,
    max_gradient=1.0,
)
optimizer.step()
moved = param.detach().tolist()
defect = not any(moved)
print(f"{'defect' if defect else 'fixed'}: expected a move by -0.5 each, seen {moved}")
sys.exit(1 if defect else 0)
