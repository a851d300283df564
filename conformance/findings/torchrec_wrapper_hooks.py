"""Wrappers have no hooks, and copying one makes the steps of all others fail.

OptimizerWrapper, and with it clipping and warmup, creates none of the dictionaries in which
torch.optim.Optimizer keeps hooks: registering a hook of any kind raises AttributeError. Worse, a deep copy
or an unpickled wrapper makes torch patch the class so that every step reads these dictionaries: from then
on each wrapper of that class in the process that is not itself a copy raises in its next step. An
evaluation that copies its optimizer ends the training.

Clauses: WRAP-025, WRAP-026, WRAP-028, WRAP-029, WRAP-030, WARM-037, WARM-058, WARM-059, CLIP-025,
CLIP-026, CLIP-072, COMB-052, COMB-054, KEYED-122.
"""

import copy
import functools
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper, OptimizerWrapper

param = torch.nn.Parameter(torch.zeros(2))
sgd = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=0.1))
optimizer = OptimizerWrapper(sgd)
seen = []
try:
    optimizer.register_step_pre_hook(lambda *_: None).remove()
except AttributeError as error:
    seen.append(f"registering a hook: AttributeError: {error}")
param.grad = torch.ones(2)
optimizer.step()
copy.deepcopy(optimizer)
try:
    optimizer.step()
except AttributeError as error:
    seen.append(f"a step after a deepcopy: AttributeError: {error}")
defect = bool(seen)
print(f"{'defect' if defect else 'fixed'}: expected a hook and a step; seen {'; '.join(seen) or 'both'}")
sys.exit(1 if defect else 0)
