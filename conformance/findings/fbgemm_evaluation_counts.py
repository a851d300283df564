"""Forward passes count as iterations, also in eval mode and without gradients.

The bias correction of Adam and LAMB, and weight decay that begins at an iteration, use this count. An
evaluation between two steps changes the second step, and a checkpoint contains a wrong count.

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
