"""A ShardedTensor accepts shards of any size, and then disagrees with its metadata.

Shards are resized to the loaded shape, although only column-wise shards may change. State of a table with
three rows is accepted for one with five; the tensor still claims five rows, and the next step reads and
writes the wrong rows.

Clauses: KEYED-058.
"""

import sys
import warnings

import torch
from torch import distributed
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer

warnings.simplefilter("ignore")
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)


def rows(value: float, *sizes: int) -> ShardedTensor:
    """Make a ShardedTensor of rows of the given sizes."""
    shards, start = [], 0
    for size in sizes:
        piece = torch.full((size, 2), value)
        shards.append(Shard.from_tensor_and_offsets(piece, [start, 0], 0))
        start += size
    return ShardedTensor._init_from_local_shards(shards, [start, 2])


param = torch.nn.Parameter(torch.zeros(5, 2))
live = rows(0.0, 5)
optimizer = KeyedOptimizer({"p": param}, {param: {"moment": live}}, [])
expected = "an error for a tensor of 3 rows over one of 5"
try:
    optimizer.load_state_dict({"state": {"p": {"moment": rows(1.0, 3)}}})
    held = tuple(live.local_shards()[0].tensor.shape)
    seen, defect = f"a tensor of {tuple(live.metadata().size)} that holds {held}", True
except Exception as error:
    seen, defect = f"{type(error).__name__}: {error}", False
distributed.destroy_process_group()
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
