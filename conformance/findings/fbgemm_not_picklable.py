"""A module cannot be pickled.

The module stores a function that is local to one of its methods. torch.save of a model, and sending a model
to another process, therefore fail, although a deep copy works.

Clauses: FUSED-048.
"""

import pickle
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
try:
    pickle.loads(pickle.dumps(tbe()))
    seen = "a copy"
except (AttributeError, TypeError, pickle.PicklingError) as error:
    seen = f"{type(error).__name__}: {error}"
defect = seen != "a copy"
print(f"{'defect' if defect else 'fixed'}: expected a copy; seen {seen}")
sys.exit(1 if defect else 0)
