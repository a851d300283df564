"""A load through wrappers calls post_load_state_dict of the wrapped optimizer several times.

The load of the wrapped optimizer calls the method, and then each outer wrapper passes its own call on: one
additional call per layer. A subclass whose method is not idempotent, for example one that converts units or
counts restarts, loads a wrong state as soon as it is wrapped.

Clauses: WRAP-009.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper, OptimizerWrapper


class Told(KeyedOptimizerWrapper):
    """Counts the calls."""

    calls = 0

    def post_load_state_dict(self) -> None:
        """Count a call."""
        self.calls += 1


told = Told({"p": torch.nn.Parameter(torch.zeros(2))}, torch.optim.Adagrad)
optimizer = OptimizerWrapper(OptimizerWrapper(told))
optimizer.load_state_dict(optimizer.state_dict())
defect = told.calls != 1
print(f"{'defect' if defect else 'fixed'}: expected 1 call in one load, seen {told.calls}")
sys.exit(1 if defect else 0)
