"""load_state_dict shares the loaded tensors with the given dictionary, and thereby with other optimizers.

Two optimizers that load the same checkpoint, or one that loads another's state_dict(), share their state:
each step of one changes the moments and counts of the other. Only a conversion to another dtype or device
makes a copy.

Clauses: ALGO-075, SPARSE-049.
"""

import copy
import sys

import torch

parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.Adam([parameter], lr=0.1)
parameter.grad = torch.ones(2)
optimizer.step()
checkpoint = copy.deepcopy(optimizer.state_dict())
others = [torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2)]
for other in others:
    other.load_state_dict(checkpoint)
weight = others[0].param_groups[0]["params"][0]
weight.grad = torch.ones(2)
others[0].step()
seen = float(others[1].state_dict()["state"][0]["step"])
defect = seen != 1.0
print(f"{'defect' if defect else 'fixed'}: expected 1 step in the optimizer that did not step, seen {seen}")
sys.exit(1 if defect else 0)
