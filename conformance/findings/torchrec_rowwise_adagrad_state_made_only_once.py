"""Parameters that are added with add_param_group, or have no state in a checkpoint, cannot be stepped.

The state is made in the constructor and nowhere else; the first step of a parameter that came later ends
with KeyError: 'sum', after the parameters before it have been updated. torch's Adagrad makes such state
in the step. The docstring of Optimizer.add_param_group names the use: layers that are made trainable as
training goes on.

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
