"""INTERPOLATE extrapolates before start_interpolating_iters, down to negative learning rates.

The stage begins where the previous one ends, which may be long before its start. Until then the line is
extended backwards, away from `value`: the first iterations of a warm-up can train with a negative learning
rate.

Clauses: WARM-023.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

param = torch.nn.Parameter(torch.zeros(2))
inner = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=0.5))

stage = WarmupStage(
    WarmupPolicy.INTERPOLATE, max_iters=14, value=0.1, start_interpolating_iters=6, end_value=1.0
)
seen = WarmupOptimizer(inner, [stage], lr=1.0).param_groups[0]["lr"]
defect = seen < 0
print(f"{'defect' if defect else 'fixed'}: expected lr = value = 0.1 before the start, seen {seen}")
sys.exit(1 if defect else 0)
