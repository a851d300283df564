"""The wrapper has no defaults, so it cannot be copied, and OneCycleLR and CyclicLR fail on it.

Every torch optimizer has the attribute defaults, but the constructor does not call that of the base class
and only passes on state and groups. Code that reads defaults raises AttributeError: schedulers that cycle
the momentum, copy.deepcopy and pickle.

Clauses: FT-030, FT-033.
"""

import copy
import sys

import torch
from torchft.optim import OptimizerWrapper


class Manager:
    """A manager that commits every step."""

    def start_quorum(self):
        """Begin."""

    def should_commit(self):
        """Commit."""
        return True


inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
optimizer = OptimizerWrapper(Manager(), inner)
failed = []
for name, use in (
    ("copy.deepcopy", lambda: copy.deepcopy(optimizer)),
    ("OneCycleLR", lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)),
):
    try:
        use()
    except AttributeError as error:
        failed.append(f"{name}: {error}")
seen = "; ".join(failed) or "both"
print(f"{'defect' if failed else 'fixed'}: expected a copy and a schedule; seen {seen}")
sys.exit(1 if failed else 0)
