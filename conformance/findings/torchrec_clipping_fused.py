"""Clipping around a fused optimizer does nothing, without an error or a warning.

A fused optimizer consumes its gradients in the backward pass, so a wrapper that clips before step() never
sees them. Users who wrap the optimizer of a sharded embedding module assume that its tables are clipped.
The same happens in a combination with dense optimizers.

Clauses: CLIP-068, CLIP-069.
"""

import sys
import warnings
from typing import Any

import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.fused import FusedOptimizer


class Fused(FusedOptimizer):
    """Stand for an optimizer whose update is part of the backward pass."""

    def step(self, closure: Any = None) -> None:
        """Do nothing."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing."""


table = torch.nn.Parameter(torch.zeros(2))
fused = Fused({"t": table}, {}, [{"params": [table]}])
seen = "no error and no warning"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        GradientClippingOptimizer(fused, GradientClipping.NORM, max_gradient=1.0).step()
    except ValueError as error:
        seen = f"ValueError: {error}"
if caught:
    seen = f"warning: {caught[0].message}"
defect = seen == "no error and no warning"
print(f"{'defect' if defect else 'fixed'}: expected an error or a warning, seen {seen}")
sys.exit(1 if defect else 0)
