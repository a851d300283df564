"""Optimizers in the backward pass never step the parameters of FSDP2, and nothing reports it.

FSDP2 sets the gradient of a shard itself, after the reduction, and not through the node of autograd on which
the optimizer waits. Training goes on, and the weights stay as they are.

Clauses: SHARD-020.
"""

import multiprocessing
import sys
import tempfile
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward


def rank(number: int, store: str, results: Any) -> None:
    """Run on one of two ranks."""
    distributed.init_process_group("gloo", store=distributed.FileStore(store, 2), rank=number, world_size=2)
    layer = torch.nn.Linear(2, 2)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    before = layer.weight.full_tensor().clone()
    _apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 0.1})
    for _ in range(2):
        layer(torch.ones(1, 2)).sum().backward()
    results.put((number, bool((layer.weight.full_tensor() == before).all())))


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
defect = any(found.values())
seen = "unchanged weights" if defect else "training"
print(f"{'defect' if defect else 'fixed'}: expected training, seen {seen}")
sys.exit(1 if defect else 0)
