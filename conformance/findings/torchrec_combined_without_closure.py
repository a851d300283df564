"""A combination with LBFGS and no closure raises after the optimizers before it have stepped.

LBFGS needs a closure. The TypeError comes from LBFGS itself, when the earlier optimizers have updated their
parameters: a caller that catches it and tries again takes their steps twice.

Clauses: COMB-051.
"""

import contextlib
import functools
import sys

import torch
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
first = KeyedOptimizerWrapper({"p": params[0]}, functools.partial(torch.optim.SGD, lr=1.0))
second = KeyedOptimizerWrapper({"p": params[1]}, torch.optim.LBFGS)
combined = CombinedOptimizer([("a", first), ("b", second)])
for param in params:
    param.grad = torch.ones(2)
with contextlib.suppress(TypeError):
    combined.step()
defect = bool(params[0].any())
print(f"{'defect' if defect else 'fixed'}: expected no step of SGD, seen {params[0].tolist()}")
sys.exit(1 if defect else 0)
