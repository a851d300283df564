"""The norm of DTensor gradients beside plain ones covers one kind only, or is None.

A DTensor by rows of norm 5 and a plain parameter of norm 12 have the norm 13 on each rank. Depending on the
version, DTensors are measured and clipped apart from plain parameters, or are not in last_total_grad_norm.
On a rank outside the mesh of a DTensor the norm is also that of the rank's own gradients.

Clauses: SHARD-003, SHARD-004, SHARD-015.
"""

import functools
import multiprocessing
import sys
import tempfile
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper


def rank(number: int, store: str, results: Any) -> None:
    """Run on one of two ranks."""
    distributed.init_process_group("gloo", store=distributed.FileStore(store, 2), rank=number, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    params = {
        "spread": torch.nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)])),
        "plain": torch.nn.Parameter(torch.zeros(1)),
    }
    params["spread"].grad = distribute_tensor(torch.tensor([3.0, 4.0]), mesh, [Shard(0)])
    params["plain"].grad = torch.tensor([12.0])
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper(params, functools.partial(torch.optim.SGD, lr=1.0)),
        GradientClipping.NORM,
        max_gradient=1.0,
    )
    optimizer.step()
    results.put((number, round(float(params["plain"].detach()), 4)))


with tempfile.NamedTemporaryFile() as file:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    ranks = [context.Process(target=rank, args=(number, file.name, results)) for number in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(15)
    hung = [number for number, each in enumerate(ranks) if each.is_alive()]
    for each in ranks:
        each.kill()
    found = dict(results.get() for _ in iter(lambda: results.empty(), True))
defect = any(found.get(number) != -0.9231 for number in range(2))
seen = f"{found}, hanging ranks {hung}"
print(f"{'defect' if defect else 'fixed'}: expected a move of -12 / 13 on both ranks, seen {seen}")
sys.exit(1 if defect else 0)
