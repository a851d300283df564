"""A learning rate that is set after the forward pass does not affect the update of that forward pass.

The forward pass stores the current learning rate, and the backward pass uses the stored value. A caller
that sets the learning rate in between, or looks up the next batch before the backward pass of the previous
one, trains with the learning rate of another step.

Clauses: FUSED-062.
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
module = tbe(learning_rate=0.5)
output = module(INDICES, OFFSETS)
module.set_learning_rate(0.125)
output.sum().backward()
taken = 1.0 - float(module.split_embedding_weights()[0][0, 0])
defect = taken != 0.125
print(f"{'defect' if defect else 'fixed'}: expected a step of 0.125, the current learning rate; seen {taken}")
sys.exit(1 if defect else 0)
