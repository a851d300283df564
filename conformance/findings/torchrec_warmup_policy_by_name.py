"""A policy that is not a WarmupPolicy silently disables the schedule.

The documentation writes the default as 'linear'; this string, for example from a configuration file, is
accepted, equals no policy, and multiplies by 1: the model trains at the full learning rate from the start.

Clauses: WARM-061.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupStage

param = torch.nn.Parameter(torch.zeros(2))
inner = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=0.5))

try:
    stage = WarmupStage(policy="linear", max_iters=100, value=0.01)
    optimizer = WarmupOptimizer(inner, [stage], lr=1.0)
    seen = f"lr = {optimizer.param_groups[0]['lr']}"
    defect = optimizer.param_groups[0]["lr"] != 0.01
except (TypeError, ValueError) as error:
    seen, defect = f"{type(error).__name__}: {error}", False
print(f"{'defect' if defect else 'fixed'}: expected an error, or lr = 0.01, seen {seen}")
sys.exit(1 if defect else 0)
