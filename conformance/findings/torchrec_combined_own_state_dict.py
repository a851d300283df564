"""A combination ignores the state_dict and load_state_dict of the optimizers that it combines.

CombinedOptimizer reads and writes the state of its optimizers by itself. A subclass that keeps
something of its own, a step count for one, and saves it in its state_dict as every torch optimizer
may, does so alone and inside an OptimizerWrapper; combined, it is dropped without a word.

Clauses: COMB-021, COMB-045.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper


class Counting(KeyedOptimizerWrapper):
    """Saves beside the state how many steps were taken."""

    count = 0

    def step(self, closure: Any = None) -> None:
        """Count, and step."""
        self.count += 1
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Add the count."""
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the count, too."""
        super().load_state_dict(state_dict)
        self.count = state_dict["count"]


def build() -> tuple[CombinedOptimizer, Counting]:
    """Combine one counting optimizer."""
    counting = Counting({"p": torch.nn.Parameter(torch.zeros(2))}, torch.optim.Adagrad)
    return CombinedOptimizer([("a", counting)]), counting


optimizer, _ = build()
for _ in range(3):
    optimizer.step()
resumed, counting = build()
try:
    resumed.load_state_dict(optimizer.state_dict())
    seen, defect = f"count = {counting.count}", counting.count != 3
except ValueError as error:
    seen, defect = f"ValueError: {error}", False
print(f"{'defect' if defect else 'fixed'}: expected count = 3 after a resume, or an error; seen {seen}")
sys.exit(1 if defect else 0)
