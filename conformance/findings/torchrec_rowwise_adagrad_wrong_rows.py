"""A parameter with three dimensions is stepped with the learning rates of other rows.

For a shape such as (3, 3, 1), a stack of tables, the state of row i is broadcast along another dimension:
an element is divided by the square root of a sum of other rows. Other shapes raise an error about
broadcasting; such shapes train.

Clauses: ALGO-064.
"""

import sys

import torch
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

stack = torch.nn.Parameter(torch.zeros(3, 3, 1))
seen: object
try:
    optimizer = RowWiseAdagrad([stack], lr=0.1, eps=0.0)
    stack.grad = torch.tensor([1.0, 2.0, 4.0]).reshape(3, 1, 1).expand(3, 3, 1).contiguous()
    optimizer.step()
    seen = stack.detach().squeeze(-1).tolist()
    # the elements of one slice have equal gradients, so their steps can only differ by a wrong rate
    defect = any(len(set(row)) > 1 for row in seen)
except (ValueError, TypeError, IndexError, RuntimeError) as error:
    seen, defect = type(error).__name__, False
print(f"{'defect' if defect else 'fixed'}: expected an error, or equal steps in a slice, seen {seen}")
sys.exit(1 if defect else 0)
