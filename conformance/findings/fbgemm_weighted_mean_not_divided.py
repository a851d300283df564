"""With mean pooling and per-sample weights, a row's gradient is not divided by the length of the bag.

On the CPU. The lookup is divided, and so is the update without weights. A table with per-sample weights
therefore learns too fast by the number of rows in each bag, a factor that differs from bag to bag.

Clauses: FUSED-088.
"""

import sys

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

INDICES, OFFSETS = torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3])
WEIGHTS = torch.tensor([0.5, 2.0, 4.0])
module = SplitTableBatchedEmbeddingBagsCodegen(
    [(4, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
    optimizer=EmbOptimType.EXACT_SGD,
    pooling_mode=PoolingMode.MEAN,
    learning_rate=1.0,
    device="cpu",
)
table = module.split_embedding_weights()[0]
table.zero_()
pooled = module(INDICES, OFFSETS, per_sample_weights=WEIGHTS)
pooled.sum().backward()
seen = (-table[:3, 0]).tolist()
defect = seen != [0.25, 1.0, 4.0]
print(
    f"{'defect' if defect else 'fixed'}: expected steps of [0.25, 1.0, 4.0], half of the weights in the bag "
    f"of two; seen {seen}"
)
sys.exit(1 if defect else 0)
