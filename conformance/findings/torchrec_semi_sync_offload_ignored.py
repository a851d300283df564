"""``offload_global_model`` is accepted, documented and ignored: the global model stays on the accelerator.

Shown on a fake CUDA device: no parameter of the global optimizer is on the CPU after a global step.

Clauses: SEMI-042.
"""

import functools
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.semi_sync import SemisyncOptimizer


class Outer(torch.optim.SGD):
    """A global optimizer as torchrec expects it: it has a global_step."""

    def global_step(self, count, closure=None):
        """Step."""
        return self.step(closure)


with FakeTensorMode():
    local, whole = (torch.nn.Parameter(torch.zeros(2, device="cuda")) for _ in range(2))
    optimizer = SemisyncOptimizer(
        global_params=[whole],
        optimizer=KeyedOptimizerWrapper({"w": local}, functools.partial(torch.optim.SGD, lr=1.0)),
        global_optimizer=KeyedOptimizerWrapper({"w": whole}, functools.partial(Outer, lr=1.0)),
        num_local_steps=2,
        offload_global_model=True,
    )
    for _ in range(4):
        local.grad, whole.grad = torch.ones_like(local), torch.ones_like(whole)
        optimizer.step()
defect = whole.device.type != "cpu"
print(f"{'defect' if defect else 'fixed'}: expected the global parameter on cpu, seen {whole.device.type}")
sys.exit(1 if defect else 0)
