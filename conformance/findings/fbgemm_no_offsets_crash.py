"""An empty offsets tensor crashes the process, also with the strictest bounds check.

A batch without offsets is a bug in the data reader, but it terminates the whole job: BoundsCheckMode.FATAL
is documented to throw an error for invalid offsets.

Clauses: FUSED-024.
"""

import subprocess
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
if sys.argv[1:] == ["look up"]:
    tbe(bounds_check_mode=BoundsCheckMode.FATAL)(INDICES, torch.zeros(0, dtype=torch.int64))
    sys.exit(0)
ended = subprocess.run([sys.executable, __file__, "look up"], capture_output=True, check=False).returncode
defect = ended < 0
print(f"{'defect' if defect else 'fixed'}: expected an error; seen exit status {ended} of the process")
sys.exit(1 if defect else 0)
