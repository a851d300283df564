"""No hook can be registered on the wrapper.

The wrapper is a torch.optim.Optimizer, but its constructor does not call that of the base class, so the
dictionaries of hooks do not exist: all six register methods raise AttributeError. Loggers, profilers and
checkpoint tools that register hooks on an optimizer fail as soon as fault tolerance is on.

Clauses: FT-026, FT-027.
"""

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


optimizer = OptimizerWrapper(Manager(), torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))
kinds = ("step", "state_dict", "load_state_dict")
missing = []
for name in [f"register_{kind}_{when}_hook" for kind in kinds for when in ("pre", "post")]:
    try:
        getattr(optimizer, name)(lambda *_: None)
    except AttributeError:
        missing.append(name)
seen = f"AttributeError from {', '.join(missing) or 'none'}"
print(f"{'defect' if missing else 'fixed'}: expected six hooks to be registered; seen {seen}")
sys.exit(1 if missing else 0)
