"""The global norm hangs if ranks list parameters of several process groups in different orders.

Ranks reduce group by group in the order of their own parameters. Each rank builds the list from the
parameters that it has, so the orders differ, and each rank waits in another all-reduce.

Clauses: SHARD-002.
"""

import functools
import multiprocessing
import sys
import tempfile
import time
from typing import Any

import torch
from torch import distributed
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper


def rank(number: int, store: str, results: Any) -> None:
    """Run on one of two ranks."""
    distributed.init_process_group("gloo", store=distributed.FileStore(store, 2), rank=number, world_size=2)
    groups = [distributed.new_group([0, 1]) for _ in range(2)]
    params = {key: torch.nn.Parameter(torch.zeros(1)) for key in ("ab" if number == 0 else "ba")}
    params["a"].grad, params["b"].grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper(params, functools.partial(torch.optim.SGD, lr=1.0)),
        GradientClipping.NORM,
        max_gradient=1.0,
        enable_global_grad_clip=True,
        param_to_pgs={param: [groups[key == "b"]] for key, param in params.items()},
    )
    optimizer.step()
    results.put((number, [round(float(params[key].detach()), 3) for key in "ab"]))


with tempfile.NamedTemporaryFile() as file:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    ranks = [context.Process(target=rank, args=(number, file.name, results)) for number in range(2)]
    for each in ranks:
        each.start()
    end = time.monotonic() + 10.0
    for each in ranks:
        each.join(max(0.0, end - time.monotonic()))
    hung = [number for number, each in enumerate(ranks) if each.is_alive()]
    for each in ranks:
        each.kill()
    found = dict(results.get() for _ in iter(lambda: results.empty(), True))
wanted = [round(-value / (2 * 25.0) ** 0.5, 3) for value in (3.0, 4.0)]
defect = bool(hung) or any(found.get(number) != wanted for number in range(2))
seen = f"{found}, hanging ranks {hung}"
print(f"{'defect' if defect else 'fixed'}: expected {wanted} on both ranks, seen {seen}")
sys.exit(1 if defect else 0)
