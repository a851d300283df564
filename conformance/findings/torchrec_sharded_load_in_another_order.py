"""If ranks list parameters in different orders, a load of another placement mixes their state.

A load copies state parameter by parameter, in the order of each rank. A copy onto another placement is an
exchange between the ranks, so that one rank sends the state of one parameter and the other rank takes it for
that of another one. No error is raised.

Clauses: SHARD-009.
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
from torchrec.optim.keyed import KeyedOptimizerWrapper


def rank(number: int, store: str, results: Any) -> None:
    """Run on one of two ranks."""
    distributed.init_process_group("gloo", store=distributed.FileStore(store, 2), rank=number, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    made = {key: torch.nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)])) for key in "ab"}
    params = {key: made[key] for key in ("ab" if number == 0 else "ba")}
    optimizer = KeyedOptimizerWrapper(params, functools.partial(torch.optim.Adagrad, lr=1.0, foreach=False))
    optimizer.init_state()
    state = {}
    for value, key in enumerate("ab", start=1):
        columns = distribute_tensor(torch.full((2, 2), float(value)), mesh, [Shard(1)])
        state[key] = {"step": torch.tensor(1.0), "sum": columns}
    optimizer.load_state_dict({"state": state})
    loaded = optimizer.state_dict()["state"]
    results.put((number, [loaded[key]["sum"].to_local().flatten().tolist() for key in "ab"]))


with tempfile.NamedTemporaryFile() as file:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    ranks = [context.Process(target=rank, args=(number, file.name, results)) for number in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(15)
    for each in ranks:
        each.kill()
    found = dict(results.get() for _ in iter(lambda: results.empty(), True))
wanted = [[1.0, 1.0], [2.0, 2.0]]
defect = any(found.get(number) != wanted for number in range(2))
print(f"{'defect' if defect else 'fixed'}: expected {wanted} on both ranks, seen {found}")
sys.exit(1 if defect else 0)
