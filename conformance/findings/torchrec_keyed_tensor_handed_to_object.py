"""A stateful object receives a tensor or a number instead of its state dict.

An object that follows the stateful protocol receives whatever the checkpoint contains under its key. An
object that does not validate its input then holds a tensor instead of its state, and fails later in other
code.

Clauses: KEYED-055.
"""

import sys

import torch
from torchrec.optim.keyed import KeyedOptimizer


class Anything:
    """An object with state that takes what it gets."""

    def __init__(self):
        self.held = {"number": 1}

    def state_dict(self):
        """Return what it holds."""
        return self.held

    def load_state_dict(self, state_dict):
        """Hold something else."""
        self.held = state_dict


param, target = torch.nn.Parameter(torch.ones(2)), Anything()
optimizer = KeyedOptimizer({"p": param}, {param: {"object": target}}, [])
try:
    optimizer.load_state_dict({"state": {"p": {"object": 3.0}}})
except ValueError as error:
    print(error)
defect = target.held != {"number": 1}
print(f"{'defect' if defect else 'fixed'}: expected an object with its state, seen one with {target.held}")
sys.exit(1 if defect else 0)
