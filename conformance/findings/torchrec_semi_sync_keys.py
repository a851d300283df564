"""One key for two tensors is accepted until the first checkpoint.

Only an assertion in `params`, which no step reads, checks that a key names the same tensor in both
optimizers: hours later state_dict fails, and the trained model state cannot be saved. One tensor under two
keys passes this check and is saved under one of the keys; load_state_dict of the same checkpoint then
misses the other.

Clauses: SEMI-008.
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


one, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
seen = []
for mine, theirs in (({"p": one}, {"p": other}), ({"p": one}, {"model.p": one})):
    local = KeyedOptimizerWrapper(mine, functools.partial(torch.optim.Adam, lr=0.1))
    try:
        optimizer = SemisyncOptimizer([one], local, KeyedOptimizerWrapper(theirs, Outer), 1)
        one.grad = torch.ones(2)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        seen.append("no error")
    except (AssertionError, ValueError) as error:
        seen.append(f"{type(error).__name__}: {error}")
defect = not torch.equal(one.detach(), torch.ones(2))
print(
    f"{'defect' if defect else 'fixed'}: expected an error for each before a parameter has moved; seen {seen}"
)
sys.exit(1 if defect else 0)
