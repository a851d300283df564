"""On the CPU, optimizers in the backward pass inside DistributedDataParallel raise after they have stepped.

DistributedDataParallel takes over such optimizers with a hook that asks for the stream of an accelerator.
Without an accelerator a backward pass steps the parameters, then raises RuntimeError.

Seen in builds for the CPU.

Clauses: SHARD-020.
"""

import multiprocessing
import sys
import tempfile
from typing import Any

import torch
from torch import distributed
from torch.distributed.optim import _apply_optimizer_in_backward


def rank(number: int, store: str, results: Any) -> None:
    """Run on one of two ranks."""
    distributed.init_process_group("gloo", store=distributed.FileStore(store, 2), rank=number, world_size=2)
    torch.manual_seed(0)
    layer = torch.nn.Linear(2, 1)
    before = layer.weight.detach().clone()
    _apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 0.1})
    try:
        runner = torch.nn.parallel.DistributedDataParallel(layer)
        for _ in range(3):
            runner(torch.ones(1, 2)).sum().backward()
        results.put((number, "training"))
    except RuntimeError as error:
        changed = not torch.equal(before, layer.weight)
        results.put((number, f"{'changed weights and ' if changed else ''}RuntimeError: {str(error)[:50]}"))


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
defect = any(str(value).startswith("changed") for value in found.values())
seen = f"{found}"
print(f"{'defect' if defect else 'fixed'}: expected training, or unchanged weights, seen {seen}")
sys.exit(1 if defect else 0)
