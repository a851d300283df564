"""Parameters that are added to the optimizer after wrapping are never clipped.

The constructor collects the parameters to clip once. A layer that is unfrozen in the middle of training and
added to the wrapped optimizer is trained without clipping although clipping is on; its gradient is also
missing from the norm.

Clauses: CLIP-039.
"""

import sys

import torch
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

first, later = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
raw = torch.optim.SGD([first], lr=1.0)
keyed = KeyedOptimizerWrapper({"first": first}, lambda _: raw)
optimizer = GradientClippingOptimizer(keyed, GradientClipping.NORM, max_gradient=1.0)
raw.add_param_group({"params": [later]})
later.grad = torch.tensor([40.0])
optimizer.step()
moved = abs(float(later.detach()))
defect = moved > 1.001
print(f"{'defect' if defect else 'fixed'}: expected a move of norm 1, seen {moved}")
sys.exit(1 if defect else 0)
