"""The computed norm is part of the autograd graph and keeps the graph alive.

Except through torch's own clip_grad_norm_, the norm is computed with gradients enabled. After a backward
pass with create_graph=True, as gradient penalties need, it holds the whole graph of the step, including
activations. Up to torchrec 1.8, last_total_grad_norm is this norm: the graph lives until the next step, and
the optimizer can no longer be deep-copied.

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
)
(param**3).sum().backward(create_graph=True)
norm, _ = optimizer.compute_total_grad_norm()
param.grad = None
defect = norm.requires_grad
print(f"{'defect' if defect else 'fixed'}: expected a norm without a graph, seen {norm}")
sys.exit(1 if defect else 0)
