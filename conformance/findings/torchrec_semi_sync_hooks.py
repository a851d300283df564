"""No hook can be registered, and after one copy every instance in the process fails to step.

The constructor calls neither that of torch.optim.Optimizer nor that of KeyedOptimizer, so the dictionaries
of hooks do not exist: all six register methods raise AttributeError. copy.deepcopy and pickle.loads patch
the step of the class to read these dictionaries, and from then on every SemisyncOptimizer.step in the
process, also of existing instances, raises the same AttributeError.

Clauses: SEMI-026, SEMI-027, SEMI-029.
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


seen = []
for name in ("step_pre", "step_post", "state_dict_post", "load_state_dict_pre"):
    try:
        getattr(build(4)[1], f"register_{name}_hook")(lambda *_: None)
    except AttributeError:
        seen.append(f"AttributeError for {name}")
param, optimizer = build(4)
copy.deepcopy(optimizer)
try:
    train(param, optimizer, 1)
except AttributeError:
    seen.append("AttributeError for a step after a copy was made")
defect = bool(seen)
print(f"{'defect' if defect else 'fixed'}: expected hooks, and a step after a copy was made; seen {seen}")
sys.exit(1 if defect else 0)
