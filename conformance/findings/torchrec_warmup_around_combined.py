"""A schedule around a combination is not saved.

CombinedOptimizer returns new copies of its state and parameters on each access, and the wrapper keeps the
copies from its construction: entries that the schedule writes into them are lost. The checkpoint lacks the
schedule, loads without an error, and the run resumes with the warm-up from the start. If this schedule is
combined again, the moments of the optimizers inside are lost as well.

Clauses: WARM-052, SEMI-038, SHARD-026.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

param = torch.nn.Parameter(torch.zeros(2))
inner = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.Adam, lr=0.5))
stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=9, value=0.0)]
optimizer = WarmupOptimizer(CombinedOptimizer([("dense", inner)]), stages, lr=0.9)
param.grad = torch.ones(2)
for _ in range(5):
    optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
seen = f"lr = {optimizer.param_groups[0]['lr']}, saved {sorted(optimizer.state_dict()['state'])}"
defect = "__warmup" not in optimizer.state_dict()["state"]
print(f"{'defect' if defect else 'fixed'}: expected lr = 0.5, saved ['__warmup', 'dense.p'], seen {seen}")
sys.exit(1 if defect else 0)
