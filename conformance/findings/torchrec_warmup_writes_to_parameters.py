"""The constructor writes a fake parameter into the caller's mapping of parameters.

That mapping is usually used again: to clip, to count, to build another optimizer, which then trains
a parameter that belongs to no model, or finds its key taken. A read-only mapping, which the
annotation (Mapping) allows, raises TypeError.

Clauses: WARM-044, WARM-077.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer

params = {"p": torch.nn.Parameter(torch.zeros(2))}
inner = KeyedOptimizerWrapper(params, functools.partial(torch.optim.SGD, lr=0.5))
WarmupOptimizer(inner, [])
seen = list(params)
defect = seen != ["p"]
print(f"{'defect' if defect else 'fixed'}: expected ['p'] in the caller's mapping, seen {seen}")
sys.exit(1 if defect else 0)
