"""An optimizer that updates in the backward pass is accepted, and trains in steps that are not committed.

Its update happens before the manager is called, so it cannot be skipped, and the wrapper neither raises nor
warns. With fused embedding tables, whose optimizer is combined with the dense one, or with torch's
_apply_optimizer_in_backward, a replica that does not commit has different embeddings from then on; only its
dense part was protected.

Clauses: FT-017.
"""

import sys
import warnings

import torch
from torchft.optim import OptimizerWrapper

warnings.simplefilter("ignore")
from torch.distributed.optim import _apply_optimizer_in_backward  # noqa: E402 - it warns


class Manager:
    """A manager that commits no step: one replica is gone, say."""

    def start_quorum(self):
        """Begin."""

    def should_commit(self):
        """Do not commit."""
        return False


param = torch.nn.Parameter(torch.ones(2))
_apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 0.5})
try:
    optimizer = OptimizerWrapper(Manager(), torch.optim.SGD([param], lr=0.5))
    optimizer.zero_grad()
    param.sum().backward()
    optimizer.step()
    seen = f"{param.tolist()} after a step that was not committed"
except ValueError as error:
    seen = f"ValueError: {error}"
defect = not torch.equal(param.detach(), torch.ones(2))
print(f"{'defect' if defect else 'fixed'}: expected an error, or [1.0, 1.0]; seen {seen}")
sys.exit(1 if defect else 0)
