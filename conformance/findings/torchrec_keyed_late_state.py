"""State that is not complete after the first step is not noticed.

The documentation requires optimizers to initialize their state fully in the first step. One that
does not is accepted: a checkpoint of the first step and one of the second do not fit each other,
and the error comes at a restart, or not at all where state is nested.

Clauses: KEYED-096.
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
