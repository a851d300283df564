"""With eps=0, which the constructor accepts, every row without a gradient becomes NaN.

The docstring gives eps no lower bound, and the constructor allows 0; a row whose sum is zero is then
computed as 0/0. Either the constructor must reject 0, or such a row must not change.

Clauses: ALGO-033.
"""

import sys

import torch
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

table = torch.nn.Parameter(torch.ones(3, 2))
try:
    optimizer = RowWiseAdagrad([table], lr=0.1, eps=0.0)
except ValueError:
    print("fixed: eps=0 raises an error")
    sys.exit(0)
table.grad = torch.zeros_like(table)
table.grad[0] = 1.0
optimizer.step()
defect = not table.detach().isfinite().all()
print(f"{'defect' if defect else 'fixed'}: expected finite rows, seen {table.detach().tolist()}")
sys.exit(1 if defect else 0)
