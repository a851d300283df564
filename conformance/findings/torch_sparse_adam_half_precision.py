"""In float16 a gradient of 1e-4 makes the weight infinite in the first step.

The square of the gradient times 1 - beta2 underflows to zero in float16, and so does eps = 1e-8: the step
divides by zero. Rows with small gradients are lost one by one.

Clauses: SPARSE-036.
"""

import sys

import torch

weight = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float16))
optimizer = torch.optim.SparseAdam([weight], lr=0.001)
values = torch.full((1, 2), 1e-4, dtype=torch.float16)
weight.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), values, (3, 2), check_invariants=True)
optimizer.step()
seen = float(weight.detach()[0, 0])
defect = not torch.isfinite(weight.detach()).all()
print(f"{'defect' if defect else 'fixed'}: expected a weight near 0.999, seen {seen}")
sys.exit(1 if defect else 0)
