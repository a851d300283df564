"""post_load_state_dict of a schedule is not passed on to a schedule inside it.

In a combination, only this call sets the learning rates after a load. Of two nested schedules, for the
learning rate and for the momentum, the inner one keeps the value from before the load until a step has used
it; a fused backward pass uses it, too.

Clauses: WARM-053.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage


def build() -> CombinedOptimizer:
    """Combine one optimizer that has two schedules."""
    param = torch.nn.Parameter(torch.zeros(2))
    inner = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=0.5))
    ramp = [WarmupStage(WarmupPolicy.LINEAR, max_iters=10, value=0.0)]
    rate = WarmupOptimizer(inner, ramp, lr=1.0)
    level = [WarmupStage(WarmupPolicy.CONSTANT, max_iters=10, value=0.5)]
    momentum = WarmupOptimizer(rate, level, lr=0.5, lr_param="momentum", param_name="__momentum")
    param.grad = torch.ones(2)
    momentum.step()
    return CombinedOptimizer([momentum])


optimizer, resumed = build(), build()
for _ in range(5):
    optimizer.step()
resumed.load_state_dict(optimizer.state_dict())
seen = f"lr = {resumed.param_groups[0]['lr']}"
defect = resumed.param_groups[0]["lr"] != 0.6
print(f"{'defect' if defect else 'fixed'}: expected lr = 0.6 after loading iteration 6, seen {seen}")
sys.exit(1 if defect else 0)
