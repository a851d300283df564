"""The tracked norm of DTensor parameters is None, with clipping by value and without clipping.

The norm is computed from the gradients of the parameters' local tensors, which have none: the gradient
belongs to the DTensor. torchrec 1.8 tracked this norm, and compute_total_grad_norm still returns it: users
who log the norm of a model under FSDP2 or tensor parallelism lose it by the upgrade.

Clauses: CLIP-056. Seen in: >=1.9.
"""

import functools
import sys

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
param = torch.nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))
param.grad = distribute_tensor(torch.tensor([30.0, 40.0]), mesh, [Shard(0)])
optimizer = GradientClippingOptimizer(
    KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.SGD, lr=1.0)),
    GradientClipping.NONE,
    track_grad_norm=True,
)
optimizer.step()
norm = optimizer.last_total_grad_norm
distributed.destroy_process_group()
defect = norm is None
print(f"{'defect' if defect else 'fixed'}: expected a norm of 50, seen {norm}")
sys.exit(1 if defect else 0)
