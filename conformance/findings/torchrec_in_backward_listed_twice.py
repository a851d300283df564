"""A parameter that is listed twice is updated twice in each backward pass.

Lists collected from modules that share a table contain it twice. The parameter then gets two optimizers and
trains with twice the learning rate, without an error or a warning. torchrec re-exports torch's function.

Clauses: INBW-018.
"""

import contextlib
import sys
import warnings

import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

warnings.simplefilter("ignore")  # it says that it is deprecated
parameter = torch.nn.Parameter(torch.ones(2))
with contextlib.suppress(ValueError):
    apply_optimizer_in_backward(torch.optim.SGD, [parameter, parameter], {"lr": 0.1})
parameter.sum().backward()
seen = float(1 - parameter.detach()[0])
defect = abs(seen - 0.2) < 1e-6
print(f"{'defect' if defect else 'fixed'}: expected one step of 0.1, or a ValueError, seen {seen}")
sys.exit(1 if defect else 0)
