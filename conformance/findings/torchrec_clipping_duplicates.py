"""A parameter that is listed in two groups is counted twice and scaled twice.

Keyed optimizers accept such groups, and a shared table may be in two of them. Its gradient counts twice in
the norm and is multiplied by the factor twice: with a norm of 50 and a bound of 1, the clipped norm is
0.01, a hundredth of the expected value.

Clauses: CLIP-038, CLIP-054, SEMI-032.
"""

import sys
from typing import Any

import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizer


class Listed(KeyedOptimizer):
    """An optimizer with a parameter in two groups."""

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


param = torch.nn.Parameter(torch.zeros(2))
inner = Listed({"p": param}, {}, [{"params": [param]}, {"params": [param]}])
param.grad = torch.tensor([30.0, 40.0])
GradientClippingOptimizer(inner, GradientClipping.NORM, max_gradient=1.0).step()
norm = float(param.grad.norm())
defect = abs(norm - 1.0) > 1e-3
print(f"{'defect' if defect else 'fixed'}: expected a gradient of norm 1, seen {norm}")
sys.exit(1 if defect else 0)
