"""On the CPU row-wise Adagrad ignores weight decay, both L2 and decoupled.

The documents say that EXACT_ROWWISE_ADAGRAD supports both. A model that is regularized on a GPU silently
trains without regularization on a CPU.

Clauses: FUSED-078.
"""

import sys

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)


def tbe(optimizer=EmbOptimType.EXACT_SGD, rows=4, **options):
    """Make one table of ones on the CPU."""
    spec = [(rows, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)]
    module = SplitTableBatchedEmbeddingBagsCodegen(spec, optimizer=optimizer, device="cpu", **options)
    module.split_embedding_weights()[0].fill_(1.0)
    return module


INDICES, OFFSETS = torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3])
seen = []
for mode in (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE):
    kind = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    module = tbe(kind, learning_rate=0.5, weight_decay=0.5, weight_decay_mode=mode)
    output = module(INDICES, OFFSETS)
    (output * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    seen.append(module.split_embedding_weights()[0][0].tolist())
defect = seen[0] in seen[1:]
print(
    f"{'defect' if defect else 'fixed'}: expected another row for each of none, L2 and decoupled decay; "
    f"seen {seen}"
)
sys.exit(1 if defect else 0)
