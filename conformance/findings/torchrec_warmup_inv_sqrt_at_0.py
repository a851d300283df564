"""INVSQRT divides by zero at iteration 0.

A schedule whose first stage is INVSQRT cannot be built: the constructor sets the learning rate of iteration
0, 1 / √0. Users have to insert a dummy stage before it.

Clauses: WARM-021.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

param = torch.nn.Parameter(torch.zeros(2))
inner = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=0.5))

stage = WarmupStage(WarmupPolicy.INVSQRT, max_iters=100)
try:
    seen = f"lr = {WarmupOptimizer(inner, [stage], lr=1.0).param_groups[0]['lr']}"
    defect = False
except ZeroDivisionError as error:
    seen, defect = f"ZeroDivisionError: {error}", True
print(f"{'defect' if defect else 'fixed'}: expected lr = 1.0 at iteration 0, seen {seen}")
sys.exit(1 if defect else 0)
