"""add_param_group accepts the sparse and complex parameters that the constructor rejects.

Only the constructor's loop over the groups checks the parameters. Layers that are unfrozen later are not
checked, and the first step fails or computes nonsense.

Clauses: SPARSE-024.
"""

import contextlib
import sys

import torch

optimizer = torch.optim.SparseAdam([torch.nn.Parameter(torch.ones(3, 2))])
seen = "a ValueError"
with contextlib.suppress(ValueError):
    optimizer.add_param_group({"params": [torch.ones(2, dtype=torch.complex64).requires_grad_()]})
    seen = f"{len(optimizer.param_groups)} groups"
defect = seen != "a ValueError"
print(f"{'defect' if defect else 'fixed'}: expected a ValueError for a complex parameter, seen {seen}")
sys.exit(1 if defect else 0)
