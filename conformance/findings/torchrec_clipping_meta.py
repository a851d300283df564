"""One parameter on the meta device disables clipping for all others.

A step in which any parameter is on the meta device skips clipping altogether. A model that is partly not
materialized, or that keeps a placeholder, trains its real parameters without clipping although clipping is
on.

Clauses: CLIP-037.
"""

import functools
import sys

import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

real = torch.nn.Parameter(torch.zeros(2))
meta = torch.nn.Parameter(torch.zeros(2, device="meta"))
real.grad = torch.tensor([30.0, 40.0])
optimizer = GradientClippingOptimizer(
    KeyedOptimizerWrapper({"r": real, "m": meta}, functools.partial(torch.optim.SGD, lr=1.0)),
    GradientClipping.NORM,
    max_gradient=1.0,
)
optimizer.step()
moved = float(real.detach().norm())
defect = moved > 1.001
print(f"{'defect' if defect else 'fixed'}: expected a move of norm 1, seen {moved}")
sys.exit(1 if defect else 0)
