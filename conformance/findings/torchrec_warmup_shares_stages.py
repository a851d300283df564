"""The caller's stages are modified and remain shared with the schedule.

The constructor writes decay_iters into every stage that does not set it. If the stage is reused with
another max_iters, for the next model of a sweep, it keeps the old length and the learning rate is wrong,
even negative. In the other direction, changing a stage for the next model changes the running schedule.

Clauses: WARM-065, WARM-066.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

param = torch.nn.Parameter(torch.zeros(2))
inner = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=0.5))

stage = WarmupStage(WarmupPolicy.POLY, max_iters=4, value=1.0)
WarmupOptimizer(inner, [stage], lr=1.0)
stage.max_iters = 10
fresh = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=0.5))
optimizer = WarmupOptimizer(fresh, [stage], lr=1.0)
param.grad = torch.zeros(2)
for _ in range(6):
    optimizer.step()
seen = f"decay_iters = {stage.decay_iters}, lr = {optimizer.param_groups[0]['lr']}"
defect = stage.decay_iters != -1
print(f"{'defect' if defect else 'fixed'}: expected decay_iters = -1, lr = 0.4, seen {seen}")
sys.exit(1 if defect else 0)
