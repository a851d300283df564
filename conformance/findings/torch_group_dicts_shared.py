"""The dict of a group becomes part of the optimizer, so two optimizers made from it share a rate.

The defaults of the first are written into the caller's dict and so are those of the second, whose own
arguments are ignored; a schedule of one moves the other.

Clauses: SPARSE-029.
"""

import sys

import torch

group = {"params": [torch.nn.Parameter(torch.ones(3, 2))]}
first = torch.optim.SparseAdam([group], lr=0.1)
second = torch.optim.SparseAdam([group], lr=0.5)
seen = second.param_groups[0]["lr"]
defect = seen != 0.5
print(f"{'defect' if defect else 'fixed'}: expected the second optimizer at its rate of 0.5, seen {seen}")
sys.exit(1 if defect else 0)
