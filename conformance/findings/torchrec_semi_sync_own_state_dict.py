"""Semi-synchronous training ignores the state_dict and load_state_dict of its two optimizers.

SemisyncOptimizer reads and writes the state of both optimizers itself. A subclass that saves something of
its own, for example a step count, does so alone and inside an OptimizerWrapper. As a local or global
optimizer its value is lost without an error, and its hooks of saving and loading do not run.

Clauses: SEMI-041.
"""

import sys
from typing import Any

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.semi_sync import SemisyncOptimizer


class Outer(torch.optim.SGD):
    """A global optimizer, as torchrec expects it: it has a global_step."""

    def global_step(self, count: torch.Tensor, closure: Any = None) -> None:
        """Step."""
        self.step(closure)


class Counting(KeyedOptimizerWrapper):
    """Count the calls of state_dict."""

    saves = 0

    def state_dict(self) -> dict[str, Any]:
        """Count, and save."""
        self.saves += 1
        return super().state_dict()


params = {"p": torch.nn.Parameter(torch.ones(2))}
local = Counting(params, lambda listed: torch.optim.Adam(listed, lr=0.1))
outer = KeyedOptimizerWrapper(params, lambda listed: Outer(listed, lr=0.1))
SemisyncOptimizer([*params.values()], local, outer).state_dict()
defect = local.saves != 1
seen = f"{'defect' if defect else 'fixed'}: expected 1 call of state_dict of the local optimizer"
print(f"{seen}; seen {local.saves}")
sys.exit(1 if defect else 0)
