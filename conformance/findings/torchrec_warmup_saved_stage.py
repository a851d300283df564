"""The saved number of the stage is believed, whatever the stages are now.

Schedules are edited between runs, longer or shorter by a stage. A load then takes the rate from the
wrong stage's formula, LINEAR far beyond 1 for example, or raises IndexError when everything has
been written. Steps move on by one stage each, so the rate is wrong for long.

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
