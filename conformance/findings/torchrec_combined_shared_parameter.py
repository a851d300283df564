"""If one parameter is in two of the combined optimizers, one of its two states is not saved.

CombinedOptimizer checks for duplicate keys, not for duplicate parameters. If a parameter has two states,
the combination shows the last one; the checkpoint lacks the other and stores the remaining one under a
misleading key. One optimizer under two keys is accepted, too, and steps twice per step.

Clauses: COMB-006.
"""

import functools
import sys

import torch
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

param = torch.nn.Parameter(torch.zeros(2))
adam = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.Adam, lr=0.1))
sgd = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))
try:
    optimizer = CombinedOptimizer([("a", adam), ("b", sgd)])
    param.grad = torch.ones(2)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    seen = f"saved { ({key: sorted(entry) for key, entry in state.items()}) }"
    defect = "exp_avg" not in {name for entry in state.values() for name in entry}
except ValueError as error:
    seen, defect = f"ValueError: {error}", False
print(f"{'defect' if defect else 'fixed'}: expected an error, or Adam's and SGD's state; seen {seen}")
sys.exit(1 if defect else 0)
