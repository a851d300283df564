"""Over process groups, float16 gradients with a norm above 256 are set to zero.

Ranks sum the p-th power of the norm, which is computed in the dtype of the gradients. In float16 the square
of 256 is infinite, so the factor is 0 and no parameter of the model moves; the square of 1e-4 is 0, so
small gradients are never clipped.

Clauses: CLIP-062.
"""

import functools
import sys

import torch
from torch import distributed
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
param = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
param.grad = torch.tensor([300.0, 400.0], dtype=torch.float16)
optimizer = GradientClippingOptimizer(
    KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=1.0)),
    GradientClipping.NORM,
    max_gradient=1.0,
    enable_global_grad_clip=True,
    param_to_pgs={param: [distributed.group.WORLD]},
)
optimizer.step()
moved = param.detach().tolist()
distributed.destroy_process_group()
defect = not any(moved)
print(f"{'defect' if defect else 'fixed'}: expected a move by (-0.6, -0.8), seen {moved}")
sys.exit(1 if defect else 0)
