"""Row-wise Adagrad ignores the initial_accumulator_value of a group.

The sums of all groups start at the value given to the constructor; the value of a group appears in
param_groups but has no effect. torch's Adagrad has the same defect.

Clauses: ALGO-096.
"""

import sys

import torch
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

table = torch.nn.Parameter(torch.ones(2, 2))
optimizer = RowWiseAdagrad([{"params": [table], "initial_accumulator_value": 0.25}], lr=0.1)
seen = optimizer.state[table]["sum"].flatten().tolist()
defect = seen != [0.25, 0.25]
print(f"{'defect' if defect else 'fixed'}: expected sums of 0.25, seen {seen}")
sys.exit(1 if defect else 0)
