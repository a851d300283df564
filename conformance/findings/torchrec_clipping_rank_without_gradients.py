"""Over process groups, a rank without gradients fails or skips the reduction.

If the sharded parameters have no gradient on a rank, the norm of an empty list raises RuntimeError; with
the infinity norm the rank skips the reduction instead, and the other ranks wait for it. With model
parallelism a rank often holds no row that a batch needs, so the whole job stops. clip_grad_norm_() fails in
the same way if no parameter has a gradient.

Clauses: CLIP-054, CLIP-059.
"""

import functools
import sys

import torch
from torch import distributed
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
sharded, replicated = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
replicated.grad = torch.tensor([30.0, 40.0])
optimizer = GradientClippingOptimizer(
    KeyedOptimizerWrapper({"s": sharded, "r": replicated}, functools.partial(torch.optim.SGD, lr=1.0)),
    GradientClipping.NORM,
    max_gradient=1.0,
    enable_global_grad_clip=True,
    param_to_pgs={sharded: [distributed.group.WORLD]},
)
try:
    optimizer.step()
    seen = f"a move of norm {float(replicated.detach().norm())}"
except RuntimeError as error:
    seen = f"RuntimeError: {error}"
distributed.destroy_process_group()
defect = seen.startswith("RuntimeError")
print(f"{'defect' if defect else 'fixed'}: expected a move of norm 1, seen {seen}")
sys.exit(1 if defect else 0)
