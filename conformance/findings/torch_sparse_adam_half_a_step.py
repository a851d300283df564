"""A step that raises has already counted, and has updated the groups before the invalid gradient.

The step count of every parameter up to the invalid gradient increases without an update of its moments, so
the bias correction is wrong from then on; a loop that catches the error has trained half of the model.

Clauses: SPARSE-032, SPARSE-033.
"""

import contextlib
import sys

import torch


def rows(*listed):
    """Make a sparse gradient of ones for some rows of three."""
    values = torch.ones(len(listed), 2)
    return torch.sparse_coo_tensor(torch.tensor([listed]), values, (3, 2), check_invariants=False)


weights = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
optimizer = torch.optim.SparseAdam([{"params": [weight]} for weight in weights], lr=0.1)
weights[0].grad = rows(0)
weights[1].grad = torch.ones(3, 2)  # dense: refused
with contextlib.suppress(RuntimeError):
    optimizer.step()
seen = weights[0].detach()[0].tolist()
defect = seen != [1.0, 1.0]
print(f"{'defect' if defect else 'fixed'}: expected unchanged parameters, (1, 1), seen {seen}")
sys.exit(1 if defect else 0)
