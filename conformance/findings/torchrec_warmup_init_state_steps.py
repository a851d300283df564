"""init_state advances the schedule.

init_state makes state loadable, and is also called if there is no checkpoint. Each call takes a dummy step,
so the run starts one iteration late and never uses its first learning rate; further calls delay it further.

Clauses: WARM-048.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

param = torch.nn.Parameter(torch.zeros(2))
inner = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=0.5))

optimizer = WarmupOptimizer(inner, [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.0)], lr=1.0)
optimizer.init_state()
seen = optimizer.param_groups[0]["lr"]
defect = seen != 0.0
print(f"{'defect' if defect else 'fixed'}: expected lr = 0.0 after init_state, seen {seen}")
sys.exit(1 if defect else 0)
