"""Parameters from add_param_group, or without state in a checkpoint, cannot be stepped.

Only the constructor creates the state; the first step of a later parameter raises KeyError: 'sum' after it
has updated the parameters before it. torch's Adagrad creates missing state in the step. The docstring of
Optimizer.add_param_group names the use: making frozen layers trainable during training.

Clauses: ALGO-080, ALGO-082.
"""

import sys

import torch
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

early, late = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
optimizer = RowWiseAdagrad([early], lr=0.1)
optimizer.add_param_group({"params": [late]})
early.grad, late.grad = torch.ones(2, 2), torch.ones(2, 2)
seen = "a step"
try:
    optimizer.step()
except KeyError as error:
    seen = f"KeyError: {error}"
defect = seen != "a step"
print(f"{'defect' if defect else 'fixed'}: expected a step of the added group, seen {seen}")
sys.exit(1 if defect else 0)
