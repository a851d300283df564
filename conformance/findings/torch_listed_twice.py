"""A parameter that is listed twice in a group is updated twice per step, with a warning at most.

Lists collected from modules that share a table contain it twice. The learning rate of this table is
doubled, and so is its step count.

Clauses: SPARSE-025.
"""

import contextlib
import sys
import warnings

import torch


def rows(*listed):
    """Make a sparse gradient of ones for some rows of three."""
    values = torch.ones(len(listed), 2)
    return torch.sparse_coo_tensor(torch.tensor([listed]), values, (3, 2), check_invariants=False)


weight = torch.nn.Parameter(torch.ones(3, 2))
seen = "a ValueError"
with warnings.catch_warnings(), contextlib.suppress(ValueError):
    warnings.simplefilter("ignore")
    optimizer = torch.optim.SparseAdam([weight, weight], lr=0.1)
    weight.grad = rows(0)
    optimizer.step()
    seen = float(1 - weight.detach()[0, 0])
defect = seen != "a ValueError" and seen > 0.15
print(f"{'defect' if defect else 'fixed'}: expected a step of 0.1, or a ValueError, seen {seen}")
sys.exit(1 if defect else 0)
