"""Offsets that do not begin at 0 are accepted, also with the strictest bounds check.

Rows before the first offset belong to no bag and are silently excluded from the lookup and from the update:
features that are concatenated with a wrong start lose rows.

Clauses: FUSED-024.
"""

import sys

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
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
module = tbe(bounds_check_mode=BoundsCheckMode.FATAL)
try:
    seen = module(INDICES, torch.tensor([1, 2, 3]))[:, 0].tolist()
except (ValueError, RuntimeError) as error:
    seen = f"{type(error).__name__}"
defect = isinstance(seen, list)
print(f"{'defect' if defect else 'fixed'}: expected an error, because row 0 belongs to no bag; seen {seen}")
sys.exit(1 if defect else 0)
