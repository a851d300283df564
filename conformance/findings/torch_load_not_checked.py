"""load_state_dict takes whatever it is given: other shapes, no moments, negative counts, rates of -5.

The state that was there is gone when the next step fails, or worse does not fail: a checkpoint of
another table, or one that is half written, is noticed too late, a negative rate never.

Clauses: SPARSE-050, SPARSE-051, SPARSE-052.
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
defect = bool(seen)
print(f"{'defect' if defect else 'fixed'}: expected a ValueError for each, {seen} accepted")
sys.exit(1 if defect else 0)
