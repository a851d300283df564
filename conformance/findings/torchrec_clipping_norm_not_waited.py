"""The norm is read on the host before its copy from the accelerator has arrived.

Without a sharded parameter the total norm starts as a number on the CPU, and the norm of the replicated
parameters is copied to it with ``non_blocking=True``. It is added at once, without a synchronization, so that
the tracked norm and what ``clip_grad_norm_`` returns are whatever the memory held. Shown here without an
accelerator: of tensors on a fake CUDA device, a copy that does not block is read by the next operator.

Clauses: CLIP-043, CLIP-044, CLIP-046, CLIP-047, CLIP-050, CLIP-052, CLIP-053, CLIP-054, CLIP-056, CLIP-059,
CLIP-064, CLIP-083, CLIP-086, CLIP-088.
"""

import functools
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper


class Copies(TorchDispatchMode):
    """Copies from the accelerator that did not wait, and the operators that read one of them."""

    def __init__(self):
        super().__init__()
        self.late, self.readers = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(arg is copy for arg in args for copy in self.late):
            self.readers.append(func)
        result = func(*args, **(kwargs or {}))
        if (kwargs or {}).get("non_blocking") and args[0].is_cuda and result.device.type == "cpu":
            self.late.append(result)
        return result


with FakeTensorMode():
    weight = torch.nn.Parameter(torch.zeros(2, device="cuda"))
    weight.grad = torch.ones(2, device="cuda")
    inner = KeyedOptimizerWrapper({"w": weight}, functools.partial(torch.optim.SGD, lr=1.0))
    optimizer = GradientClippingOptimizer(inner, GradientClipping.NORM, max_gradient=1.0)
    with Copies() as copies:
        optimizer.clip_grad_norm_()
defect = bool(copies.readers)
seen = f"read by {copies.readers[0]}" if defect else "not read"
print(
    f"{'defect' if defect else 'fixed'}: expected that a copy is read after a synchronization, seen: {seen}"
)
sys.exit(1 if defect else 0)
