"""RowWiseAdagrad raises RuntimeError for a DTensor by rows without rows.

Its sum of rows is reshaped, which DTensor refuses for an empty sharded dimension. torch's optimizers step
such a parameter.

Clauses: SHARD-011, SHARD-012.
"""

import multiprocessing
import sys
import tempfile
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad


def rank(number: int, store: str, results: Any) -> None:
    """Run on one of two ranks."""
    distributed.init_process_group("gloo", store=distributed.FileStore(store, 2), rank=number, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    param = torch.nn.Parameter(distribute_tensor(torch.zeros(0, 4), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.zeros(0, 4), mesh, [Shard(0)])
    try:
        RowWiseAdagrad([param], lr=0.1).step()
        results.put((number, "a step"))
    except RuntimeError as error:
        results.put((number, f"RuntimeError: {str(error)[:60]}"))


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
defect = any(value != "a step" for value in found.values())
seen = f"{found}"
print(f"{'defect' if defect else 'fixed'}: expected a step on both ranks, seen {seen}")
sys.exit(1 if defect else 0)
