"""One backward pass through two forward passes makes two updates, not one with the summed gradient.

Two towers over the same tables, or two losses, are one training step. Here each forward pass leads to its
own update: Adagrad adds the squares of both parts instead of the square of their sum, so the step size
depends on how a batch is split.

Clauses: FUSED-039.
"""

import sys

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)


def tbe(optimizer=EmbOptimType.EXACT_SGD, rows=4, **options):
    """Make one table of ones on the CPU."""
    spec = [(rows, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)]
    module = SplitTableBatchedEmbeddingBagsCodegen(spec, optimizer=optimizer, device="cpu", **options)
    module.split_embedding_weights()[0].fill_(1.0)
    return module


INDICES, OFFSETS = torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3])
module = tbe(EmbOptimType.EXACT_ADAGRAD, learning_rate=1.0, eps=0.0)
row, one = torch.tensor([0]), torch.tensor([0, 1])
(module(row, one).sum() + module(row, one).sum()).backward()
seen = float(module.get_optimizer_state()[0]["sum"][0, 0])
defect = seen != 4.0
print(f"{'defect' if defect else 'fixed'}: expected a sum of (1 + 1)² = 4; seen {seen}")
sys.exit(1 if defect else 0)
