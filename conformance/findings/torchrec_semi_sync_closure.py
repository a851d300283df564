"""A closure is evaluated with gradients disabled.

The whole step runs under no_grad. torch optimizers enable gradients around a closure, but an optimizer that
leaves this to its caller receives a closure that cannot run its backward pass: the loss has no graph.

Clauses: SEMI-022.
"""

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


class Plain(torch.optim.Optimizer):
    """An optimizer that leaves the gradient mode to its caller."""

    def step(self, closure=None):
        """Evaluate."""
        return closure()


param = torch.nn.Parameter(torch.ones(2))
local = KeyedOptimizerWrapper({"p": param}, functools.partial(Plain, defaults={}))
optimizer = SemisyncOptimizer([param], local, KeyedOptimizerWrapper({"p": param}, Outer), 4)
seen = []
optimizer.step(lambda: seen.append(torch.is_grad_enabled()))
defect = seen != [True]
print(f"{'defect' if defect else 'fixed'}: expected a closure with gradients enabled, [True]; seen {seen}")
sys.exit(1 if defect else 0)
