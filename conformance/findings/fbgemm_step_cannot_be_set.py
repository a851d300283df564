"""After a forward pass, set_optimizer_step and a loaded step count have no effect.

Updates use a second counter, which copies the first one only while the second is 0. A checkpoint that is
loaded into a module with earlier forward passes continues with the module's own count.

Clauses: FUSED-068.
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
module = tbe(EmbOptimType.EXACT_ROWWISE_ADAGRAD)
module(INDICES, OFFSETS)
module.set_optimizer_step(100)
module(INDICES, OFFSETS)
seen = int(module.iter), int(module.iter_cpu)
defect = seen != (101, 101)
print(
    f"{'defect' if defect else 'fixed'}: expected (101, 101): the count that is saved and the one "
    f"that is used; seen {seen}"
)
sys.exit(1 if defect else 0)
