"""A clipping argument that is not a member of GradientClipping silently disables clipping.

The string "norm", for example from a configuration file, or a misspelt kind is accepted but equals no
member, and the model trains without clipping.

Clauses: CLIP-012.
"""

import functools
import sys

import torch
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

param = torch.nn.Parameter(torch.zeros(2))
param.grad = torch.tensor([30.0, 40.0])
try:
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=1.0)),
        "norm",  # type: ignore[arg-type]
        max_gradient=1.0,
    )
    optimizer.step()
    seen = f"a move of norm {float(param.detach().norm())}"
    defect = float(param.detach().norm()) > 1.001
except (TypeError, ValueError) as error:
    seen = f"{type(error).__name__}: {error}"
    defect = False
print(f"{'defect' if defect else 'fixed'}: expected an error, or a move of norm 1, seen {seen}")
sys.exit(1 if defect else 0)
