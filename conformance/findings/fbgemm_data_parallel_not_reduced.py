"""Inside DistributedDataParallel tables are trained by the batch of each rank, and drift apart silently.

The gradients are used up in the backward pass, so that DistributedDataParallel cannot reduce them. With
find_unused_parameters nothing is reported: after one step the replicas differ.

Clauses: SHARD-019.
"""

import multiprocessing
import sys
import tempfile
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import distributed


def rank(number: int, store: str, results: Any) -> None:
    """Run on one of two ranks."""
    distributed.init_process_group("gloo", store=distributed.FileStore(store, 2), rank=number, world_size=2)
    specs = [(4, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)]
    options: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0}
    table: Any = SplitTableBatchedEmbeddingBagsCodegen(specs, **options)
    for weight in table.split_embedding_weights():
        weight.zero_()
    runner = torch.nn.parallel.DistributedDataParallel(table, find_unused_parameters=True)
    try:
        runner(torch.tensor([number]), torch.tensor([0, 1])).sum().backward()
        results.put((number, table.split_embedding_weights()[0][:2, 0].tolist()))
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
defect = found.get(0) != found.get(1)
seen = f"first two rows {found}"
print(f"{'defect' if defect else 'fixed'}: expected equal tables, or an error, seen {seen}")
sys.exit(1 if defect else 0)
