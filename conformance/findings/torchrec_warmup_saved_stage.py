"""A load uses the saved stage number, whatever the current stages are.

Users edit schedules between runs and add or remove a stage. A load then uses the formula of the wrong
stage, for example LINEAR far beyond 1, or raises IndexError after everything has been written. Each step
advances by at most one stage, so the learning rate stays wrong for long.

Clauses: WARM-054.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

param = torch.nn.Parameter(torch.zeros(2))
inner = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=0.5))

stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.0)]
optimizer = WarmupOptimizer(inner, stages, lr=1.0)
param.grad = torch.ones(2)
optimizer.step()
saved = optimizer.state_dict()
longer_run = {**saved, "state": {"__warmup": {"warmup": torch.tensor([40, 0])}}}
optimizer.load_state_dict(longer_run)
seen = f"lr = {optimizer.param_groups[0]['lr']}"
defect = optimizer.param_groups[0]["lr"] != 1.0
print(f"{'defect' if defect else 'fixed'}: expected lr = 1.0 after the last stage, seen {seen}")
sys.exit(1 if defect else 0)
