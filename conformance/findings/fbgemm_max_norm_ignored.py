"""On the CPU max_norm is accepted and ignored.

Rows grow beyond the requested bound. max_norm is an option of the constructor, and nothing says that it has
no effect.

Clauses: FUSED-079.
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
seen = []
for kind in (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD):
    module = tbe(kind, learning_rate=0.5, max_norm=0.25)
    module(INDICES, OFFSETS).sum().backward()
    seen.append(round(float(module.split_embedding_weights()[0][0].norm()), 3))
defect = max(seen) > 0.26
print(f"{'defect' if defect else 'fixed'}: expected the updated row of norm at most 0.25; seen {seen}")
sys.exit(1 if defect else 0)
