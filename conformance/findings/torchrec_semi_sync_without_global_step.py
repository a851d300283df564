"""A global optimizer that cannot take a global step raises only at the first global step.

Any keyed optimizer is accepted as the global one. It must wrap an optimizer with a method global_step, but
this is neither documented nor checked before the call: after num_local_steps local steps, training ends
with an AttributeError, with moved parameters and both counters advanced.

Clauses: SEMI-003.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.semi_sync import SemisyncOptimizer

param = torch.nn.Parameter(torch.ones(2))
members = [KeyedOptimizerWrapper({"p": param}, torch.optim.SGD) for _ in range(2)]
seen = "no error"
try:
    optimizer = SemisyncOptimizer([param], *members, num_local_steps=4)
    for step in range(4):
        seen = f"an error in step {step + 1}"
        param.grad = torch.ones(2)
        optimizer.step()
except (AttributeError, TypeError, ValueError) as error:
    seen += f": {error}"
defect = not torch.equal(param.detach(), torch.ones(2))
print(f"{'defect' if defect else 'fixed'}: expected an error before a parameter has moved; seen {seen}")
sys.exit(1 if defect else 0)
