"""Options of a group are not checked: a negative rate or decay given by group trains the wrong way.

The constructors refuse lr=-0.1 as an argument, and accept {"params": ..., "lr": -0.1}, in the constructor
and in add_param_group. It is the same in SGD, Adagrad, Adam and SparseAdam,
and in torchrec's RowWiseAdagrad.

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
