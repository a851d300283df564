"""Invalid options are accepted: weight decay that is not supported, a negative learning rate, a NaN eps.

The decay is silently ignored, the negative learning rate increases the loss, and the NaN eps makes the
table NaN after one step. The constructor raises no error.

Clauses: FUSED-034.
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
wrong = [
    {"learning_rate": -1.0},
    {"eps": float("nan")},
    {"weight_decay": 0.5, "weight_decay_mode": WeightDecayMode.L2},
]
accepted = []
for options in wrong:
    try:
        tbe(EmbOptimType.EXACT_ADAGRAD, **options)
        accepted.append(next(iter(options)))
    except (ValueError, AssertionError, RuntimeError):
        pass
defect = bool(accepted)
print(f"{'defect' if defect else 'fixed'}: expected errors; seen {accepted} accepted")
sys.exit(1 if defect else 0)
