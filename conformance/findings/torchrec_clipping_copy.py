"""Copying one clipping optimizer breaks every other one in the process.

Unpickling, and so deepcopy, makes torch patch `step` of the class with hook calls; optimizers
that were built by the constructor have no table of hooks, so from then on their step raises
AttributeError, the copied original included. A shadow model that is made by deepcopy in the
middle of training ends the run. All wrappers of torchrec share the cause: their constructor
does not set up what torch's would.

Clauses: CLIP-072.
"""

import copy
import functools
import sys

import torch
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

param = torch.nn.Parameter(torch.zeros(2))
param.grad = torch.tensor([3.0, 4.0])
optimizer = GradientClippingOptimizer(
    KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=1.0))
)
optimizer.step()  # works
copy.deepcopy(optimizer)
try:
    optimizer.step()
    seen = "a step"
except AttributeError as error:
    seen = f"AttributeError: {error}"
defect = seen != "a step"
print(f"{'defect' if defect else 'fixed'}: expected a step, seen {seen}")
sys.exit(1 if defect else 0)
