"""load_state_dict is decided by each rank alone: one refuses, the other has already loaded, or hangs.

Nothing is agreed before state is written. If the checkpoint of one rank is incomplete, that rank keeps the
old state, and the others continue with the new one. A rank whose state has another placement waits in the
redistribution for a rank that refuses. The error does not name a rank.

Clauses: SHARD-007, SHARD-008, SHARD-010, SHARD-016.
"""

import contextlib
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
    param = torch.nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    optimizer = KeyedOptimizerWrapper({"p": param}, functools.partial(torch.optim.Adagrad, lr=1.0))
    optimizer.init_state()
    new = distribute_tensor(torch.full((4,), 7.0), mesh, [Shard(0)])
    state: dict[str, Any] = {"p": {"step": torch.tensor(3.0), "sum": new}} if number == 0 else {}
    with contextlib.suppress(Exception):  # torchrec has assertions
        optimizer.load_state_dict({"state": state})
    entry = optimizer.state_dict()["state"]["p"]
    results.put((number, entry["sum"].to_local().tolist()))


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
defect = bool(hung) or any(value != [0.0, 0.0] for value in found.values())
seen = f"state {found}, hanging ranks {hung}"
print(f"{'defect' if defect else 'fixed'}: expected unchanged state on both ranks, seen {seen}")
sys.exit(1 if defect else 0)
