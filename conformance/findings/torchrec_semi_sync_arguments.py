"""An invalid num_local_steps and invalid global parameters are accepted.

With NaN, the result of a failed division in a configuration, no global step is ever taken: the regions
silently diverge. A fraction synchronizes at unexpected steps (2.5: every fifth), and a negative number acts
like a positive one. Names in place of parameters are dropped.

Clauses: SEMI-002, SEMI-004.
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
seen = []
for listed, every in ((params.values(), float("nan")), (params.values(), 2.5), (params, 16)):
    try:
        local = KeyedOptimizerWrapper(params, torch.optim.Adam)
        optimizer = SemisyncOptimizer(listed, local, KeyedOptimizerWrapper(params, Outer), every)
        optimizer.step()
        seen.append(f"{[*listed] if listed is params else every} accepted")
    except (TypeError, ValueError) as error:
        print(error)
defect = bool(seen)
print(f"{'defect' if defect else 'fixed'}: expected an error for each; seen {seen}")
sys.exit(1 if defect else 0)
