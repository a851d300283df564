"""A step that raises is counted.

The counter of local steps increases before the local step, and that of global steps before the global step.
A trainer that continues after an out-of-memory error or a failed all-reduce permanently has the wrong
distance to the next global step: it waits in a collective that the other regions do not enter, or they wait
for it.

Clauses: SEMI-023.
"""

import contextlib
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


class Failing(torch.optim.SGD):
    """An optimizer that runs out of memory."""

    def step(self, closure=None):
        """Fail."""
        raise RuntimeError("out of memory")


param = torch.nn.Parameter(torch.ones(2))
local = KeyedOptimizerWrapper({"p": param}, functools.partial(Failing, lr=0.1))
optimizer = SemisyncOptimizer([param], local, KeyedOptimizerWrapper({"p": param}, Outer), 4)
with contextlib.suppress(RuntimeError):
    optimizer.step()
seen = int(optimizer.params["__semisync_local_step_counter__"])
defect = seen != 0
print(f"{'defect' if defect else 'fixed'}: expected 0 steps after one that failed; seen {seen}")
sys.exit(1 if defect else 0)
