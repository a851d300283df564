"""Invalid numbers are accepted: a NaN or negative lr, and NaN or infinity in a stage.

torch optimizers reject such a learning rate in their constructors; the schedule overwrites the learning
rate after this check. One step makes every parameter NaN, or training increases the loss.

Clauses: WARM-033, WARM-064.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

param = torch.nn.Parameter(torch.zeros(2))
inner = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=0.5))

stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=9, value=float("nan"))]
accepted = []
for what, given, lr in (("value = nan", stages, 1.0), ("lr = nan", [], float("nan")), ("lr = -1", [], -1.0)):
    try:
        fresh = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=0.5))
        WarmupOptimizer(fresh, given, lr=lr)
        accepted.append(what)
    except ValueError:
        pass
seen = f"{accepted} accepted"
defect = bool(accepted)
print(f"{'defect' if defect else 'fixed'}: expected a ValueError for each, seen {seen}")
sys.exit(1 if defect else 0)
