"""gradient_clipping clips the gradient of each bag separately, not the summed gradient of a row.

A row that occurs in many bags receives the sum of as many clipped gradients. The bound therefore holds only
for rare rows; a popular row can move by any amount.

Clauses: FUSED-072.
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
module = tbe(learning_rate=1.0, gradient_clipping=True, max_gradient=0.25)
module(torch.zeros(8, dtype=torch.int64), torch.arange(9)).sum().backward()
taken = 1.0 - float(module.split_embedding_weights()[0][0, 0])
defect = taken > 0.25
print(f"{'defect' if defect else 'fixed'}: expected a step of at most 0.25; seen {taken}")
sys.exit(1 if defect else 0)
