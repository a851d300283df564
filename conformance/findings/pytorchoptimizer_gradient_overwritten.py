"""A step of LARS writes its momentum buffer into the gradient.

A second step with the same gradient, as in gradient accumulation, uses other numbers.

Clauses: ALGO-041.
"""

import sys

import torch
from pytorch_optimizer import LARS

weight = torch.nn.Parameter(torch.ones(2, 2))
weight.grad = torch.full((2, 2), 0.5)
LARS([weight], lr=0.1).step()
seen = weight.grad[0, 0].item()
print(f"{'fixed' if seen == 0.5 else 'defect'}: expected a gradient of 0.5 after the step, seen {seen}")
sys.exit(0 if seen == 0.5 else 1)
