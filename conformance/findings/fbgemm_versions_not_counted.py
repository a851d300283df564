"""An update does not change the version of a table, so autograd does not notice it.

A graph that saved a table, such as that of a regularizer, goes backward with the new values after an update,
without an error: the gradient is silently wrong. An update by torch raises RuntimeError.

Clauses: FUSED-094.
"""

import sys

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

spec = [(4, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)]
module = SplitTableBatchedEmbeddingBagsCodegen(spec, optimizer=EmbOptimType.EXACT_SGD, device="cpu")
table = module.split_embedding_weights()[0]
scale = torch.ones(1, requires_grad=True)
graph = (scale * table).sum()
module(torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3])).sum().backward()
try:
    graph.backward()
    defect = True
except RuntimeError:
    defect = False
what = "a gradient" if defect else "RuntimeError"
print(f"{'defect' if defect else 'fixed'}: expected RuntimeError for a saved table, seen {what}")
sys.exit(1 if defect else 0)
