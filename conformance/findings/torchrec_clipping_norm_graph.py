"""The tracked norm is part of the autograd graph and keeps it alive.

Outside the path of torch's own clip_grad_norm_ the norm is computed with gradients recorded.
After a backward with create_graph=True, as gradient penalties need, last_total_grad_norm holds
the whole graph of the step, activations included, until the next step; and the optimizer can no
longer be deep-copied.

Clauses: CLIP-047.
"""

import functools
import sys

import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

param = torch.nn.Parameter(torch.tensor([3.0]))
optimizer = GradientClippingOptimizer(
    KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=1.0)),
    GradientClipping.NONE,
    track_grad_norm=True,
)
(param**3).sum().backward(create_graph=True)
optimizer.step()
norm = optimizer.last_total_grad_norm
param.grad = None
defect = norm is not None and norm.requires_grad
print(f"{'defect' if defect else 'fixed'}: expected a norm without a graph, seen {norm}")
sys.exit(1 if defect else 0)
