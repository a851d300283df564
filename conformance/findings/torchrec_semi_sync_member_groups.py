"""Optimizers that are set to save their groups do not do so inside a SemisyncOptimizer.

SemisyncOptimizer has its own flag for saving groups, which starts as False, and ignores those of the two
optimizers; CombinedOptimizer takes over the common flag and rejects different ones. A job that sets the
flag where it builds its optimizers has no learning rates in its checkpoints.

Clauses: SEMI-037.
"""

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


params = {"p": torch.nn.Parameter(torch.ones(2))}
members = [KeyedOptimizerWrapper(params, torch.optim.Adam), KeyedOptimizerWrapper(params, Outer)]
for member in members:
    member.save_param_groups(True)
optimizer = SemisyncOptimizer([*params.values()], *members)
seen = sorted(optimizer.state_dict())
defect = "param_groups" not in seen
print(f"{'defect' if defect else 'fixed'}: expected param_groups beside state; seen {seen}")
sys.exit(1 if defect else 0)
