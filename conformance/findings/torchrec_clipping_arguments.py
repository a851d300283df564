"""A negative or NaN max_gradient and a zero or negative norm_type are accepted.

With max_gradient = -1, a common way to write "off", NORM reverses every gradient, so that training ascends,
and VALUE sets every element to the bound. NaN destroys all parameters in one step. An exponent of 0 counts
elements, and a negative one is dominated by the smallest element: neither bounds anything.

Clauses: CLIP-011, CLIP-013.
"""

import functools
import sys

import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

param = torch.nn.Parameter(torch.zeros(2))
param.grad = torch.tensor([3.0, 4.0])
try:
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=1.0)),
        GradientClipping.NORM,
        max_gradient=-1.0,
    )
    optimizer.step()
    seen = f"a move uphill by {param.detach().tolist()}"
except ValueError as error:
    seen = f"ValueError: {error}"
defect = not seen.startswith("ValueError")
print(f"{'defect' if defect else 'fixed'}: expected a ValueError, seen {seen}")
sys.exit(1 if defect else 0)
