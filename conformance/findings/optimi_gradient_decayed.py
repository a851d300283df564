"""A step with weight decay adds the decay to the gradient in place.

A second step with the same gradient, as in gradient accumulation, decays twice; a closure, another optimizer
or a logger sees the decayed gradient.

Clauses: ALGO-041.
"""

import sys

import optimi
import torch

weight = torch.nn.Parameter(torch.ones(2, 2))
optimizer = optimi.SGD([weight], lr=0.1, weight_decay=0.5)
weight.grad = torch.ones(2, 2)
optimizer.step()
seen = weight.grad[0, 0].item()
print(f"{'fixed' if seen == 1.0 else 'defect'}: expected a gradient of 1.0 after the step, seen {seen}")
sys.exit(0 if seen == 1.0 else 1)
