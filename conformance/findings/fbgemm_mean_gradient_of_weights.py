"""With mean pooling, the gradient of the per-sample weights is not divided by the length of the bag.

On the CPU. Learned weights (for positions, for example) train too fast by the number of rows in each bag, a
factor that differs from bag to bag. The gradient of the tables is divided correctly.

Clauses: FUSED-047.
"""

import sys

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
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
module = tbe(pooling_mode=PoolingMode.MEAN)
weights = torch.ones(3, requires_grad=True)
module(INDICES, OFFSETS, per_sample_weights=weights).sum().backward()
seen = weights.grad.tolist()
defect = seen != [2.0, 2.0, 4.0]
print(
    f"{'defect' if defect else 'fixed'}: expected [2.0, 2.0, 4.0], half of a row's sum in the bag of two; "
    f"seen {seen}"
)
sys.exit(1 if defect else 0)
