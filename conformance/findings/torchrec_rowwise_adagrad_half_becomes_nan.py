"""In float16 every row without a gradient becomes NaN in the first step.

eps (1e-10) is added to a float16 square root, where it rounds to zero; a row whose sum is zero is computed
as 0/0. A batch touches few rows of a table, so all other rows are lost at once. A float16 table also loses
small gradients, whose squares underflow before they are summed.

Clauses: ALGO-028, ALGO-032.
"""

import sys

import torch
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

table = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float16))
optimizer = RowWiseAdagrad([table], lr=0.1)
table.grad = torch.zeros_like(table)
table.grad[0] = 1.0
optimizer.step()
seen = table.detach()[1:].tolist()
defect = not table.detach().isfinite().all()
print(f"{'defect' if defect else 'fixed'}: expected rows 1 and 2 to stay at 1, seen {seen}")
sys.exit(1 if defect else 0)
