"""A param_name that is already a key replaces the parameter with that key.

A parameter with this name loses its key: its state cannot be saved (KeyError). The same happens to a
schedule around another schedule if both use the default param_name. The error comes when the first
checkpoint is written, hours after the mistake.

Clauses: WARM-045.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

param = torch.nn.Parameter(torch.zeros(2))
inner = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=0.5))
stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=9, value=0.0)]
try:
    once = WarmupOptimizer(inner, stages)
    twice = WarmupOptimizer(once, stages, lr_param="momentum")
    param.grad = torch.ones(2)
    twice.step()
    twice.state_dict()
    seen, defect = "no error", True
except ValueError as error:
    seen, defect = f"ValueError: {error}", False
except KeyError as error:
    seen, defect = f"KeyError from state_dict: a parameter of {tuple(error.args[0].shape)}", True
print(f"{'defect' if defect else 'fixed'}: expected a ValueError from the constructor, seen {seen}")
sys.exit(1 if defect else 0)
