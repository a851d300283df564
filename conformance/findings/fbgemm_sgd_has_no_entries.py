"""For exact SGD, get_optimizer_state has no entry for any table.

The documentation says that the list has one entry per table. A caller that joins the list with the tables,
as torchrec's fused modules do, gets an optimizer without parameters whose learning rate cannot be set.

Clauses: FUSED-057.
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
module = tbe()
seen = len(module.get_optimizer_state()), len(module.split_optimizer_states())
defect = seen != (1, 1)
print(
    f"{'defect' if defect else 'fixed'}: expected (1, 1): one entry, possibly empty, for the table; "
    f"seen {seen}"
)
sys.exit(1 if defect else 0)
