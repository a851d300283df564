"""Options of a group are not validated: a negative learning rate or decay in a group trains in reverse.

The constructors reject lr=-0.1 as an argument but accept {"params": ..., "lr": -0.1}, in the constructor
and in add_param_group. SGD, Adagrad, Adam, SparseAdam and torchrec's RowWiseAdagrad have the same defect.

Clauses: ALGO-061, SPARSE-022.
"""

import sys

import torch

seen = []
for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.SparseAdam):
    parameter = torch.nn.Parameter(torch.ones(2))
    try:
        kind([{"params": [parameter], "lr": -0.1}], lr=0.1)
    except ValueError:
        continue
    seen.append(kind.__name__)
print(f"{'defect' if seen else 'fixed'}: expected a ValueError for lr=-0.1 in a group, seen none from {seen}")
sys.exit(1 if seen else 0)
