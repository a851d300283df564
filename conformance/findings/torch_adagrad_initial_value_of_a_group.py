"""Adagrad ignores the initial_accumulator_value of a group.

The sums of all groups start at the value given to the constructor; the value of a group appears in
param_groups but has no effect. torch documents that the options of a group override those of the
constructor. torchrec's RowWiseAdagrad has the same defect.

Clauses: ALGO-096.
"""

import sys

import torch

parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.Adagrad([{"params": [parameter], "initial_accumulator_value": 0.25}], lr=0.1)
seen = optimizer.state[parameter]["sum"].tolist()
defect = seen != [0.25, 0.25]
print(f"{'defect' if defect else 'fixed'}: expected sums of 0.25, seen {seen}")
sys.exit(1 if defect else 0)
