"""init_state takes a local step, and does not create the global optimizer's state.

The method is inherited from KeyedOptimizer, and its dummy step is a local step here: the counter advances,
so this worker reaches each global step one step before the others, and with num_local_steps=1 the model
moves. The global optimizer's state, which the first global step creates, is still missing: a fresh
optimizer cannot load, in the documented way, the checkpoint of a job that has synchronized.

Clauses: SEMI-014, SEMI-015.
"""

import copy
import functools
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.semi_sync import SemisyncOptimizer


class Outer(torch.optim.Optimizer):
    """A global optimizer with momentum, as torchrec expects it: it has a global_step."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def global_step(self, count, closure=None):
        """Move the parameters, with momentum."""
        for param in self.param_groups[0]["params"]:
            entry = self.state[param]
            if not entry:
                entry.update(momentum=torch.zeros_like(param))
            param.sub_(entry["momentum"].mul_(0.5).add_(param), alpha=0.1)


def build(every):
    params = {"p": torch.nn.Parameter(torch.ones(2))}
    local = KeyedOptimizerWrapper(params, functools.partial(torch.optim.Adam, lr=0.1))
    outer = KeyedOptimizerWrapper(params, Outer)
    return params["p"], SemisyncOptimizer([params["p"]], local, outer, num_local_steps=every)


def train(param, optimizer, steps):
    for _ in range(steps):
        param.grad = torch.ones(2)
        optimizer.step()


param, optimizer = build(4)
train(param, optimizer, 5)
checkpoint = copy.deepcopy(optimizer.state_dict())
param, fresh = build(4)
fresh.init_state()
try:
    fresh.load_state_dict(checkpoint)
    seen = "loaded"
except ValueError as error:
    seen = f"ValueError: {error}"
param, other = build(4)
other.init_state()
train(param, other, 3)
early = "semi_sync_global_momentum" in other.state_dict()["state"]["p"]
seen += f", and a global step {'3' if early else '4'} local ones after init_state"
defect = seen != "loaded, and a global step 4 local ones after init_state"
print(f"{'defect' if defect else 'fixed'}: expected loaded, and 4 local steps to a global one; seen {seen}")
sys.exit(1 if defect else 0)
