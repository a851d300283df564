"""Forwards count as iterations, in eval mode and without gradients too.

The count is what Adam's and LAMB's bias correction, and decay that begins at an iteration, go by. An
evaluation between two steps changes the second; a checkpoint then has a count that no training has.

Clauses: FUSED-027.
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
module = tbe(EmbOptimType.EXACT_ROWWISE_ADAGRAD).eval()
with torch.no_grad():
    for _ in range(5):
        module(INDICES, OFFSETS)
seen = int(module.iter)
defect = seen != 0
print(f"{'defect' if defect else 'fixed'}: expected a count of 0 updates; seen {seen}")
sys.exit(1 if defect else 0)
