"""With a GradScaler the model does not learn: gradients are divided by the scale twice.

param_groups lists the groups of both optimizers, and a parameter that both have, the usual case, is in two
groups. GradScaler divides every gradient of every group, so the gradient of a shared parameter is silently
divided by the scale twice, initially 65536.

Clauses: SEMI-031.
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
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
scaler.scale(param.sum()).backward()
scaler.unscale_(optimizer)
seen = param.grad.tolist()
defect = seen != [1.0, 1.0]
print(f"{'defect' if defect else 'fixed'}: expected the gradient [1.0, 1.0] after unscaling; seen {seen}")
sys.exit(1 if defect else 0)
