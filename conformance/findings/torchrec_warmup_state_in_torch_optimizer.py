"""The schedule puts its state into the inner torch optimizer.

There the state belongs to a parameter that is in no group, so torch's own state_dict raises KeyError from
the first step on, and so does any code that saves, copies or inspects the torch optimizer.

Clauses: WARM-075.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

param = torch.nn.Parameter(torch.zeros(2))
plain = torch.optim.SGD([param], lr=0.5, momentum=0.9)
inner = KeyedOptimizerWrapper({"p": param}, lambda _: plain)
optimizer = WarmupOptimizer(inner, [WarmupStage(WarmupPolicy.LINEAR, max_iters=9, value=0.0)])
param.grad = torch.ones(2)
optimizer.step()
try:
    seen, defect = f"{list(plain.state_dict()['state'])}", False
except KeyError:
    seen, defect = "KeyError", True
print(f"{'defect' if defect else 'fixed'}: expected [0] in a state dict of torch, seen {seen}")
sys.exit(1 if defect else 0)
