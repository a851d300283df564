"""A load replaces state under a number by state under its text, which the member does not read.

The joint state dict has names with the prefix of the member. A load removes the prefix and writes the text as
the key: the state under the number is gone, and the next step begins anew.

Clauses: SEMI-038.
"""

import copy
import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.semi_sync import SemisyncOptimizer


class Member(torch.optim.Optimizer):
    """An optimizer whose state has a number as its key, with the global step that torchrec expects."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})

    def step(self, closure=None):
        """Make the state."""
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault(0, torch.zeros(2))

    def global_step(self, count, closure=None):
        """Make the state."""
        self.step()


params = {"p": torch.nn.Parameter(torch.ones(2))}
members = [KeyedOptimizerWrapper(params, Member) for _ in range(2)]
optimizer = SemisyncOptimizer([params["p"]], *members, num_local_steps=1)
optimizer.step()
optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
keys = list(members[0].state[params["p"]])
defect = keys != [0]
print(f"{'defect' if defect else 'fixed'}: expected state under [0] after a load, seen {keys}")
sys.exit(1 if defect else 0)
