"""A clipping factor that underflows float16 sets valid gradients to zero.

The factor max_gradient / norm is rounded to the dtype of the gradient before the multiplication. In float16
a factor below 6e-8 becomes 0 and one below 6e-5 loses digits, although float16 can represent the clipped
gradient. The step silently does nothing.

Clauses: CLIP-016.
"""

import functools
import sys

import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

param = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
param.grad = torch.tensor([3e4, 4e4], dtype=torch.float16)
optimizer = GradientClippingOptimizer(
    KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=1.0)),
    GradientClipping.NORM,
    max_gradient=1e-3,
)
optimizer.step()
moved = param.detach().tolist()
defect = not any(moved)
print(f"{'defect' if defect else 'fixed'}: expected a move by (-0.0006, -0.0008), seen {moved}")
sys.exit(1 if defect else 0)
