"""A checkpoint without global optimizer state lacks the step counters and cannot be loaded.

The counters are saved inside the state of the global optimizer's parameters. This state does not exist
before the first global step, and never exists for a global optimizer without momentum. state_dict then
silently omits the counters, and load_state_dict of the same checkpoint raises RuntimeError after it has
written everything else: a job that is preempted early cannot resume.

Clauses: SEMI-016.
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


param, optimizer = build(16)
train(param, optimizer, 5)
checkpoint = copy.deepcopy(optimizer.state_dict())
param, resumed = build(16)
train(param, resumed, 1)
try:
    resumed.load_state_dict(checkpoint)
    seen = "loaded"
except RuntimeError as error:
    seen = f"RuntimeError: {error}"
defect = seen != "loaded"
print(f"{'defect' if defect else 'fixed'}: expected the checkpoint of step 5 of 16 to load; seen {seen}")
sys.exit(1 if defect else 0)
