"""The norm of gradients on two devices cannot be computed.

``compute_total_grad_norm``, and so every step that tracks the norm, joins norms of several devices with
``torch.cat``, which raises. ``torch.nn.utils.clip_grad_norm_``, which the same optimizer clips with, takes
gradients on several devices. Shown with tensors on a fake CUDA device: the devices of what is joined.

Clauses: DEV-008.
"""

import functools
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper


class Joined(TorchDispatchMode):
    """The devices of the tensors that were joined."""

    def __init__(self):
        super().__init__()
        self.devices = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.cat.default, torch.ops.aten.stack.default):
            self.devices |= {tensor.device.type for tensor in args[0]}
        return func(*args, **(kwargs or {}))


with FakeTensorMode():
    params = {device: torch.nn.Parameter(torch.zeros(2, device=device)) for device in ("cuda", "cpu")}
    for param in params.values():
        param.grad = torch.ones_like(param)
    inner = KeyedOptimizerWrapper(params, functools.partial(torch.optim.SGD, lr=1.0))
    optimizer = GradientClippingOptimizer(inner, GradientClipping.VALUE, max_gradient=1.0)
    with Joined() as joined:
        optimizer.compute_total_grad_norm()
defect = len(joined.devices) > 1
seen = " and ".join(sorted(joined.devices)) or "none"
print(f"{'defect' if defect else 'fixed'}: expected norms of one device to be joined, seen {seen}")
sys.exit(1 if defect else 0)
