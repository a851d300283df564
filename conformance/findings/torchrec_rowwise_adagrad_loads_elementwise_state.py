"""Row-wise Adagrad accepts the state of elementwise Adagrad, and then follows neither algorithm.

A sum of shape (rows, width) is accepted in place of (rows, 1). The step adds the mean of a row's squares to
each element of the sum and divides elementwise: training silently continues on a trajectory that belongs to
no algorithm, and the memory savings of row-wise state are lost.

Clauses: ALGO-078.
"""

import sys

import torch
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

tables = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
adagrad = torch.optim.Adagrad([tables[0]], lr=0.1)
optimizer = RowWiseAdagrad([tables[1]], lr=0.1)
for table in tables:
    table.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
adagrad.step()
seen = "a load and a step"
try:
    optimizer.load_state_dict(adagrad.state_dict())
    optimizer.step()
except Exception as error:
    seen = f"{type(error).__name__}: {error}"
defect = seen == "a load and a step"
print(f"{'defect' if defect else 'fixed'}: expected an error for state of shape (2, 2), seen {seen}")
sys.exit(1 if defect else 0)
