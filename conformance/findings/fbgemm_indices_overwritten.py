"""By default, out-of-bounds indices are overwritten with 0 in the caller's tensor, and train row 0.

The caller's batch is modified: if it is logged or looked up in a second module, the invalid index appears
as row 0. The documents say that invalid indices are fixed, but not that this happens in the caller's
tensor.

Clauses: FUSED-029.
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
module, indices = tbe(learning_rate=0.5), torch.tensor([3, 100, -2])
module(indices, OFFSETS).sum().backward()
defect = indices.tolist() != [3, 100, -2]
print(
    f"{'defect' if defect else 'fixed'}: expected the caller's indices [3, 100, -2]; seen {indices.tolist()}"
)
sys.exit(1 if defect else 0)
