"""A restart period that is not positive raises only when its stage begins.

With sgdr_period = 0 in a later stage, the schedule is built, trains, and raises ZeroDivisionError in the
step in which the stage begins, after the parameters were updated. With a negative period the cosine is
evaluated at wrong iterations.

Clauses: WARM-063.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

param = torch.nn.Parameter(torch.zeros(2))
inner = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=0.5))

stages = [
    WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.0),
    WarmupStage(WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS, max_iters=9, sgdr_period=0),
]
try:
    optimizer = WarmupOptimizer(inner, stages, lr=1.0)
    for _ in range(4):
        optimizer.step()
    seen, defect = "no error", True
except ValueError as error:
    seen, defect = f"ValueError: {error}", False
except ZeroDivisionError as error:
    seen, defect = f"ZeroDivisionError in a step: {error}", True
print(f"{'defect' if defect else 'fixed'}: expected a ValueError from the constructor, seen {seen}")
sys.exit(1 if defect else 0)
