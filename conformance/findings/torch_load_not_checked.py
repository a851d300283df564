"""load_state_dict accepts wrong shapes, missing moments, negative step counts and a learning rate of -5.

The old state is already lost when a later step fails, or no step fails: a checkpoint of another table, or a
truncated one, is noticed too late, and a negative learning rate never.

Clauses: SPARSE-050, SPARSE-051, SPARSE-052, ALGO-116.
"""

import copy
import sys

import torch


def rows(*listed):
    """Make a sparse gradient of ones for some rows of three."""
    values = torch.ones(len(listed), 2)
    return torch.sparse_coo_tensor(torch.tensor([listed]), values, (3, 2), check_invariants=False)


seen = []
for name, value in (("exp_avg", torch.zeros(5, 7)), ("step", -1), ("exp_avg", None), ("lr", -5.0)):
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.SparseAdam([weight], lr=0.1)
    weight.grad = rows(0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    if name == "lr":
        saved["param_groups"][0]["lr"] = value
    elif value is None:
        del saved["state"][0][name]
    else:
        saved["state"][0][name] = value
    try:
        optimizer.load_state_dict(saved)
    except ValueError:
        continue
    seen.append(f"{name} {'missing' if value is None else getattr(value, 'shape', value)}")
for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW):
    optimizer = kind([torch.nn.Parameter(torch.ones(3, 2))], lr=0.1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = -5.0
    try:
        optimizer.load_state_dict(saved)
    except ValueError:
        continue
    seen.append(f"lr -5.0 of {kind.__name__}")
defect = bool(seen)
print(f"{'defect' if defect else 'fixed'}: expected a ValueError for each, {seen} accepted")
sys.exit(1 if defect else 0)
