"""A deep copy of an optimizer with an LRScheduler trains the original; pickling it fails.

The scheduler sets a bound `step` method on the instance. torch excludes this attribute from copies, but
torchrec copies all attributes: the step of the copy moves the parameters of the original, and pickling
raises.

Clauses: KEYED-108, COMB-040, WRAP-031.
"""

import copy
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper

param = torch.nn.Parameter(torch.ones(1))
optimizer = KeyedOptimizerWrapper({"p": param}, lambda params: torch.optim.SGD(params, lr=0.5))
torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
other = copy.deepcopy(optimizer)
param.grad, other.params["p"].grad = torch.ones(1), torch.ones(1)
other.step()
expected = "original 1.0 and copy 0.5 after a step of the copy"
seen = f"original {float(param)} and copy {float(other.params['p'])}"
defect = (float(param), float(other.params["p"])) != (1.0, 0.5)
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
