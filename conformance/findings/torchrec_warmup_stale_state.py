"""A saved state dict always shows the iteration of the step at which it was taken.

Each step creates a new state tensor. All other state in a state dict is live, and the documentation
recommends to use it that way: take the state dict once, load a checkpoint into its tensors, save it later.
The schedule's entry is stale after one step, so a checkpoint written from it has current moments and an old
iteration, and resumes at the wrong learning rate.

Clauses: WARM-042.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

param = torch.nn.Parameter(torch.zeros(2))
inner = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=0.5))

optimizer = WarmupOptimizer(inner, [WarmupStage(WarmupPolicy.LINEAR, max_iters=9, value=0.0)])
param.grad = torch.ones(2)
optimizer.step()
saved = optimizer.state_dict()["state"]["__warmup"]["warmup"]
for _ in range(5):
    optimizer.step()
seen = f"iteration {saved[0].item()}"
defect = saved[0].item() != 6
print(f"{'defect' if defect else 'fixed'}: expected iteration 6 in the earlier state dict, seen {seen}")
sys.exit(1 if defect else 0)
