"""On the CPU stochastic_rounding has no effect on tables in half precision.

Updates below half a unit in the last place are always lost, although the option promises to apply them with
proportional probability: such rows stop learning.

Clauses: FUSED-049.
"""

import sys

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
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
half = {"weights_precision": SparseType.FP16, "stochastic_rounding": True}
module = tbe(rows=4096, learning_rate=2.0**-13, **half)
module(torch.arange(4096), torch.arange(4097)).sum().backward()
changed = float((module.split_embedding_weights()[0] != 1.0).float().mean())
defect = changed == 0.0
print(
    f"{'defect' if defect else 'fixed'}: expected about a quarter of the rows rounded down; "
    f"seen {changed:.0%}"
)
sys.exit(1 if defect else 0)
