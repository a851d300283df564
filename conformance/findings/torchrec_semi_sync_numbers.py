"""State that is a number is silently not loaded: the old value stays.

Each access to the joint state returns a new dictionary. A load copies into the tensors in it, but writes a
number (the step count of many optimizers) into a dictionary that is then discarded. Bias corrections and
schedules of the local or the global optimizer continue from the wrong step.

Clauses: SEMI-017.
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
                entry.update(momentum=torch.zeros_like(param), step=0)
            entry["step"] += 1
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


param, optimizer = build(1)
train(param, optimizer, 5)
checkpoint = copy.deepcopy(optimizer.state_dict())
param, resumed = build(1)
train(param, resumed, 1)
resumed.load_state_dict(checkpoint)
seen = resumed.state_dict()["state"]["p"]["semi_sync_global_step"]
defect = seen != 5
print(f"{'defect' if defect else 'fixed'}: expected 5 global steps, as in the checkpoint; seen {seen}")
sys.exit(1 if defect else 0)
