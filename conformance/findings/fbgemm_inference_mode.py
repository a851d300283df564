"""On the CPU a module raises NotImplementedError in torch.inference_mode: its lookup has no kernel there.

Evaluation between two epochs, a typical use of inference mode, fails; under torch.no_grad it works.

Clauses: FUSED-027.
"""

import sys

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

tables = SplitTableBatchedEmbeddingBagsCodegen(
    [(4, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
    optimizer=EmbOptimType.EXACT_ADAGRAD,
    learning_rate=0.125,
)
tables.eval()
seen = "the rows"
with torch.inference_mode():
    try:
        tables(torch.tensor([2]), torch.tensor([0, 1]))
    except NotImplementedError as error:
        seen = f"NotImplementedError: {str(error)[:90]}"
defect = seen != "the rows"
print(f"{'defect' if defect else 'fixed'}: expected the rows, seen {seen}")
sys.exit(1 if defect else 0)
