"""A module that is converted or moved after the call silently stops training.

module.to(dtype) or module.cuda() replaces the autograd node that the hook is registered on. From then on no
backward pass updates the parameters, and gradients accumulate in .grad without being zeroed. A run that
applies the optimizers before it moves the model trains nothing.

Clauses: INBW-023.
"""

import sys

import torch
from torch.distributed.optim import _apply_optimizer_in_backward

layer = torch.nn.Linear(2, 1)
_apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 0.1})
layer.double()
before = layer.bias.detach().clone()
layer(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
seen = float(before - layer.bias.detach())
defect = abs(seen - 0.1) > 1e-6
print(f"{'defect' if defect else 'fixed'}: expected a step of 0.1 after layer.double(), seen {seen}")
sys.exit(1 if defect else 0)
