"""A call that fails at one parameter has already applied the optimizer to the parameters before it.

A caller that catches the error, corrects the list and repeats the call has two optimizers on all other
parameters: these silently train with twice the learning rate. torchrec re-exports torch's function.

Clauses: INBW-016.
"""

import contextlib
import sys
import warnings

import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

warnings.simplefilter("ignore")  # it says that it is deprecated
parameter = torch.nn.Parameter(torch.ones(2))
frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
with contextlib.suppress(Exception):
    apply_optimizer_in_backward(torch.optim.SGD, [parameter, frozen], {"lr": 0.1})
apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})
parameter.sum().backward()
seen = float(1 - parameter.detach()[0])
defect = abs(seen - 0.1) > 1e-6
print(f"{'defect' if defect else 'fixed'}: expected a step of 0.1 after a second, correct call, seen {seen}")
sys.exit(1 if defect else 0)
