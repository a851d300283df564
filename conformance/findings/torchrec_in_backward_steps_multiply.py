"""If a parameter has n optimizers, each takes n steps in one backward pass.

Each call adds a hook that steps all optimizers of the parameter. Later hooks find no gradient, but step
counts, and schedules driven by step hooks, advance n times too fast. torchrec re-exports torch's function.

Clauses: INBW-009.
"""

import sys
import warnings

import torch
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

warnings.simplefilter("ignore")  # it says that it is deprecated
parameter = torch.nn.Parameter(torch.ones(2))
for _ in range(3):
    apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})
steps = []
parameter._in_backward_optimizers[0].register_step_post_hook(lambda *_: steps.append(1))
parameter.sum().backward()
seen = len(steps)
defect = seen != 1
print(f"{'defect' if defect else 'fixed'}: expected one step of the first of three optimizers, seen {seen}")
sys.exit(1 if defect else 0)
