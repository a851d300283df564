"""Counters that contradict each other, or are not counts, are loaded.

Both counters are saved once per parameter, and all copies are loaded into one tensor: the last one wins. A
checkpoint assembled from two steps, or a negative count, raises no error; a missing copy raises one after
everything else was written. Workers that resume from it reach their global steps at different times.

Clauses: SEMI-018.
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


param, optimizer = build(2)
train(param, optimizer, 5)
checkpoint = copy.deepcopy(optimizer.state_dict())
checkpoint["state"]["p"]["__semisync_local_step_counter__"].fill_(-3)
try:
    optimizer.load_state_dict(checkpoint)
    counter = optimizer.params["__semisync_local_step_counter__"]
    seen = f"{int(counter)} local steps after loading"
except ValueError as error:
    seen = f"ValueError: {error}"
defect = not seen.startswith("ValueError")
print(f"{'defect' if defect else 'fixed'}: expected a ValueError for -3 local steps; seen {seen}")
sys.exit(1 if defect else 0)
