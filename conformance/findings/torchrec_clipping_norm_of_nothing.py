"""The tracked infinity norm of a step without gradients is minus infinity.

A norm is never negative. In a log or a monitor, minus infinity breaks averages, plots and alerts of every
rank that it is combined with.

Clauses: CLIP-046. Seen in: <1.9.
"""

import functools
import sys

import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

param = torch.nn.Parameter(torch.zeros(2))
optimizer = GradientClippingOptimizer(
    KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=1.0)),
    GradientClipping.NONE,
    norm_type="inf",
    track_grad_norm=True,
)
optimizer.step()
norm = optimizer.last_total_grad_norm
defect = norm is not None and float(norm) < 0
print(f"{'defect' if defect else 'fixed'}: expected 0, or None, seen {norm}")
sys.exit(1 if defect else 0)
