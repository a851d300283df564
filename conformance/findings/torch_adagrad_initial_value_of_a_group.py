"""Adagrad ignores the initial_accumulator_value of a group.

The sums of all groups begin at the value given to the constructor; a group that says another one has it in
param_groups, and it does nothing. torch's documentation on per-parameter options says that options of a
group replace those of the constructor. It is the same in torchrec's RowWiseAdagrad.

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
