"""SGD adds the duplicates of a sparse gradient to the weight one by one and loses small ones to rounding.

Each addition is rounded at the magnitude of the weight. A row that a batch looks up often has many small
gradients; those below half a unit of the weight are lost, whatever their sum is. A dense or coalesced
gradient contains the sum.

Clauses: ALGO-029.
"""

import sys

import torch

count = 10_000
weight = torch.nn.Parameter(torch.ones(1, 1))
weight.grad = torch.sparse_coo_tensor(
    torch.zeros(1, count, dtype=torch.int64), torch.full((count, 1), 2e-8), (1, 1), check_invariants=True
)
torch.optim.SGD([weight], lr=1.0).step()
seen = float(weight.detach())
defect = abs(seen - (1 - count * 2e-8)) > 1e-6
print(f"{'defect' if defect else 'fixed'}: expected {1 - count * 2e-8} after 10,000 duplicates, seen {seen}")
sys.exit(1 if defect else 0)
