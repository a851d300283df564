"""A gradient for row -1 is written to the memory before the parameter and its moments.

torch builds sparse tensors without a check by default, so a wrong index from a hash or a subtraction
reaches the step. It corrupts the heap: the process crashes later, in other code, or continues with damaged
numbers.

Clauses: SPARSE-033.
"""

import contextlib
import sys

import torch


def rows(*listed):
    """Make a sparse gradient of ones for some rows of three."""
    values = torch.ones(len(listed), 2)
    return torch.sparse_coo_tensor(torch.tensor([listed]), values, (3, 2), check_invariants=False)


# parameter and moments lie inside larger buffers here, so that the fault can be seen and does no harm
buffers = [torch.zeros(5, 2) for _ in range(3)]
weight = torch.nn.Parameter(buffers[0][1:4])
optimizer = torch.optim.SparseAdam([weight], lr=0.1)
weight.grad = rows(0)
optimizer.step()
for name, buffer in zip(("exp_avg", "exp_avg_sq"), buffers[1:], strict=True):
    optimizer.state[weight][name] = buffer[1:4]
weight.grad = rows(-1)
with contextlib.suppress(Exception):
    optimizer.step()
seen = [buffer[0].tolist() for buffer in buffers]
defect = any(any(row) for row in seen)
print(f"{'defect' if defect else 'fixed'}: expected zeros before the parameter and its moments, seen {seen}")
sys.exit(1 if defect else 0)
