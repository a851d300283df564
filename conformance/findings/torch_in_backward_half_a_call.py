"""A call that fails at one parameter has already applied the optimizer to the parameters before it.

A caller that catches the error, corrects the list and repeats the call has two optimizers on all other
parameters: these silently train with twice the learning rate.

Clauses: INBW-016.
"""

import contextlib
import sys

import torch
from torch.distributed.optim import _apply_optimizer_in_backward

parameter = torch.nn.Parameter(torch.ones(2))
frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
with contextlib.suppress(Exception):
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter, frozen], {"lr": 0.1})
_apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})
parameter.sum().backward()
seen = float(1 - parameter.detach()[0])
defect = abs(seen - 0.1) > 1e-6
print(f"{'defect' if defect else 'fixed'}: expected a step of 0.1 after a second, correct call, seen {seen}")
sys.exit(1 if defect else 0)
