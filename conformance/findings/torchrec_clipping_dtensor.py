"""Clipping by norm silently skips DTensor parameters.

The norm is computed from the gradients of the parameters' local tensors, which have none: the gradient
belongs to the DTensor. Models under FSDP2 or tensor parallelism train without clipping although it is on.
Plain parameters beside them are clipped by a norm that excludes the DTensor gradients.

Clauses: CLIP-055, CLIP-056.
See also: https://github.com/meta-pytorch/torchrec/pull/2091
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
    GradientClipping.NORM,
    max_gradient=1.0,
)
optimizer.step()
moved = float(param.detach().to_local().norm())
distributed.destroy_process_group()
defect = moved > 1.001
print(f"{'defect' if defect else 'fixed'}: expected a move of norm 1, seen {moved}")
sys.exit(1 if defect else 0)
