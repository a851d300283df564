"""The state of a schedule is loaded without validation.

A negative iteration, a fraction, NaN and a tensor of one number are all accepted (truncated or broadcast),
and the learning rate becomes whatever the formula gives, here a negative number. A damaged or foreign
checkpoint is noticed only after the model has diverged.

Clauses: WARM-055.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

param = torch.nn.Parameter(torch.zeros(2))
inner = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=0.5))

optimizer = WarmupOptimizer(inner, [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.0)], lr=1.0)
optimizer.step()
damaged = {"state": {"__warmup": {"warmup": torch.tensor([-7, 0])}}}
try:
    optimizer.load_state_dict(damaged)
    seen, defect = f"lr = {optimizer.param_groups[0]['lr']}", True
except ValueError as error:
    seen, defect = f"ValueError: {error}", False
print(f"{'defect' if defect else 'fixed'}: expected a ValueError for iteration -7, seen {seen}")
sys.exit(1 if defect else 0)
