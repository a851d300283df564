"""VALUE raises RuntimeError in a step in which no parameter has a gradient.

Without clipping, or with NORM, such a step succeeds: a rank without a batch, a frozen phase, a step right
after zero_grad, or an EmptyFusedOptimizer. With VALUE, torch raises RuntimeError about an empty nested
list, which ends the run. With a closure, the first step of every run is such a step.

Clauses: CLIP-020, CLIP-031, CLIP-046, CLIP-070, COMB-054.
"""

import functools
import sys

import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

param = torch.nn.Parameter(torch.zeros(2))
optimizer = GradientClippingOptimizer(
    KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=1.0)),
    GradientClipping.VALUE,
    max_gradient=1.0,
)
try:
    optimizer.step()
    seen = "a step"
except RuntimeError as error:
    seen = f"RuntimeError: {error}"
defect = seen != "a step"
print(f"{'defect' if defect else 'fixed'}: expected a step, seen {seen}")
sys.exit(1 if defect else 0)
