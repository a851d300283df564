"""A parameter to which an optimizer was applied is never freed, and neither is its optimizer.

A global map holds the autograd node that accumulates into the parameter, and the node holds the parameter.
A process that builds several models in sequence, such as a search or a notebook, keeps all of their tables
and optimizer states.

Clauses: INBW-031.
"""

import gc
import sys
import weakref

import torch
from torch.distributed.optim import _apply_optimizer_in_backward

parameter = torch.nn.Parameter(torch.ones(2))
_apply_optimizer_in_backward(torch.optim.Adam, [parameter], {"lr": 0.1})
parameter.sum().backward()
weak = weakref.ref(parameter)
del parameter
gc.collect()
seen = "freed" if weak() is None else "still there"
defect = seen != "freed"
print(f"{'defect' if defect else 'fixed'}: expected a parameter without references to be freed, seen {seen}")
sys.exit(1 if defect else 0)
