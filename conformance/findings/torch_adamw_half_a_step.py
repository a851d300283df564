"""A step of AdamW that raises for state of another shape has already decayed the weights.

The decay of the parameter, and the update of all parameters before it, remain; a loop that catches the error
has trained half of the model.

Clauses: ALGO-078.
"""

import contextlib
import sys

import torch

weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.5)
weight.grad = torch.zeros(2)
optimizer.step()
saved = optimizer.state_dict()
saved["state"][0]["exp_avg"] = torch.ones(3)
optimizer.load_state_dict(saved)
before = weight.tolist()
with contextlib.suppress(RuntimeError):
    optimizer.step()
defect = weight.tolist() != before
print(f"{'defect' if defect else 'fixed'}: expected unchanged weights, {before}, seen {weight.tolist()}")
sys.exit(1 if defect else 0)
