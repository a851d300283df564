"""POLY continues after decay_iters: with negative or rising learning rates, or an error.

With decay_iters below max_iters, the base 1 − i / decay_iters becomes negative. An odd power then gives
negative learning rates, so training increases the loss; an even power lets the learning rate rise without
bound; a fractional power raises "math domain error" in the middle of a run, after the parameters were
updated.

Clauses: WARM-022.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

param = torch.nn.Parameter(torch.zeros(2))
inner = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=0.5))

stage = WarmupStage(WarmupPolicy.POLY, max_iters=12, value=1.0, decay_iters=5)
optimizer = WarmupOptimizer(inner, [stage], lr=1.0)
for _ in range(8):
    optimizer.step()
seen = optimizer.param_groups[0]["lr"]
defect = seen < 0
print(f"{'defect' if defect else 'fixed'}: expected lr = 0 at iteration 8, decay_iters = 5, seen {seen}")
sys.exit(1 if defect else 0)
