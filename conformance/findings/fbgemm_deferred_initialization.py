"""A module that was made on the device "meta" cannot look up rows after to_empty.

``to_empty`` leaves tensors that are neither parameters nor buffers on "meta", and gives the buffers that
describe the tables (rows, offsets, hash sizes) memory without values. Nothing computes them again, so lookups
raise an error or read other rows.

Clauses: FUSED-100.
"""

import sys

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

spec = [(4, 4, EmbeddingLocation.HOST, ComputeDevice.CPU), (6, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)]
made, deferred = (
    SplitTableBatchedEmbeddingBagsCodegen(
        spec, optimizer=EmbOptimType.EXACT_SGD, device=torch.device(device), learning_rate=0.5
    )
    for device in ("cpu", "meta")
)
deferred.to_empty(device="cpu")
for buffer in deferred.buffers():
    buffer.zero_()  # as memory that the system gives for the first time
for module in (made, deferred):
    for weight in module.split_embedding_weights():
        weight.fill_(1.0)
indices, offsets = torch.tensor([0, 3, 5]), torch.tensor([0, 2, 3])
expected = made(indices, offsets).tolist()
try:
    found = deferred(indices, offsets).tolist()
    seen = "the rows" if found == expected else f"{found}"
except (RuntimeError, ValueError) as error:
    seen = f"{type(error).__name__}: {str(error).splitlines()[0]}"
defect = seen != "the rows"
print(f"{'defect' if defect else 'fixed'}: expected the rows of the tables after to_empty; seen {seen}")
sys.exit(1 if defect else 0)
