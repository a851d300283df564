"""State that is incomplete after the first step is not detected.

The documentation requires optimizers to create their complete state in the first step. An optimizer that
does not is accepted: checkpoints of its first and second step do not fit each other, and the error comes at
a restart, or, for nested state, never.

Clauses: KEYED-096, KEYED-119.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizerWrapper


class Late(torch.optim.SGD):
    """An optimizer that makes a part of its state in the second step."""

    def step(self, closure: object = None) -> None:
        """Add to the state what is missing."""
        for param in self.param_groups[0]["params"]:
            self.state[param]["late" if "early" in self.state[param] else "early"] = 1


param = torch.nn.Parameter(torch.ones(1))
optimizer = KeyedOptimizerWrapper({"p": param}, lambda params: Late(params, lr=0.1))
param.grad = torch.ones(1)
optimizer.step()
expected = "an error in the second step"
try:
    optimizer.step()
    seen, defect = "no error", True
except (RuntimeError, ValueError) as error:
    seen, defect = f"{type(error).__name__}: {error}", False
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
