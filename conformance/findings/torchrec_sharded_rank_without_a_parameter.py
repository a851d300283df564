"""With a global norm, a rank without a parameter of param_to_pgs uses its own norm, and the other ranks hang.

Only ranks with such a parameter take part in the all-reduce. With table-wise sharding a rank may have none:
it scales its replicated parameters by another factor, or the others wait for it without end.

Clauses: SHARD-001, SHARD-005.
"""

import functools
import multiprocessing
import sys
import tempfile
from typing import Any

import torch
from torch import distributed
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper


def rank(number: int, store: str, results: Any) -> None:
    """Run on one of two ranks."""
    distributed.init_process_group("gloo", store=distributed.FileStore(store, 2), rank=number, world_size=2)
    params = {"dense": torch.nn.Parameter(torch.zeros(1))}
    params["dense"].grad = torch.tensor([12.0])
    if number == 0:
        params["table"] = torch.nn.Parameter(torch.zeros(2))
        params["table"].grad = torch.tensor([3.0, 4.0])
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper(params, functools.partial(torch.optim.SGD, lr=1.0)),
        GradientClipping.NORM,
        max_gradient=1.0,
        enable_global_grad_clip=True,
        param_to_pgs={params["table"]: [distributed.group.WORLD]} if number == 0 else {},
    )
    try:
        optimizer.step()
    except RuntimeError:  # the other rank ended without it
        return
    results.put((number, round(float(params["dense"].detach()), 4)))


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
defect = bool(hung) or found.get(0) != found.get(1)
seen = f"moves of the replicated parameter {found}, hanging ranks {hung}"
print(f"{'defect' if defect else 'fixed'}: expected one move on both ranks, seen {seen}")
sys.exit(1 if defect else 0)
