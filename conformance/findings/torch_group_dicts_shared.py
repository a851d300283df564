"""The dict of a group becomes part of the optimizer, so two optimizers built from it share a learning rate.

The first optimizer writes its defaults into the caller's dict, so the arguments of the second are ignored;
a schedule of one optimizer changes the learning rate of the other.

Clauses: SPARSE-029.
"""

import sys

import torch

group = {"params": [torch.nn.Parameter(torch.ones(3, 2))]}
first = torch.optim.SparseAdam([group], lr=0.1)
second = torch.optim.SparseAdam([group], lr=0.5)
seen = second.param_groups[0]["lr"]
defect = seen != 0.5
print(
    f"{'defect' if defect else 'fixed'}: expected a learning rate of 0.5 in the second optimizer, seen {seen}"
)
sys.exit(1 if defect else 0)
