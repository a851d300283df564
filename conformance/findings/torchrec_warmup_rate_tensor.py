"""A learning rate that is a tensor is replaced by a number.

A capturable, fused or compiled step reads the tensor. A captured CUDA graph continues with the old tensor,
which no group contains any more, so the schedule silently has no effect; a compiled step is recompiled for
each number.

Clauses: WARM-031, CLIP-086, FUSED-104, WARM-079.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

param = torch.nn.Parameter(torch.zeros(2))
rate = torch.tensor(0.5)
inner = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.Adam, lr=rate))
optimizer = WarmupOptimizer(inner, [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.25)], lr=1.0)
held = optimizer.param_groups[0]["lr"]
seen = f"{held!r} in the group, {rate.item()} in the tensor"
defect = held is not rate
print(f"{'defect' if defect else 'fixed'}: expected the tensor, filled with 0.25, seen {seen}")
sys.exit(1 if defect else 0)
