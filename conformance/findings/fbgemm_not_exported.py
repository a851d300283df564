"""torch.export cannot export a table on the CPU: the lookup has no implementation for tensors without values.

The lookup operator that the module calls has no fake kernel, so tracing raises UnsupportedOperatorException,
in evaluation too.

Clauses: FUSED-101.
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
module = SplitTableBatchedEmbeddingBagsCodegen(spec, optimizer=EmbOptimType.EXACT_SGD, device="cpu").eval()
try:
    torch.export.export(module, (torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3])), strict=False)
    seen = "an exported program"
except Exception as error:
    seen = f"{type(error).__name__}: {str(error).splitlines()[0]}"
defect = seen != "an exported program"
print(f"{'defect' if defect else 'fixed'}: expected an exported program; seen {seen}")
sys.exit(1 if defect else 0)
