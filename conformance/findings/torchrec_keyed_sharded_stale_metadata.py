"""After column-wise shards of another width are loaded, the metadata is stale.

The local tensors are resized, as documented for resharding, but the metadata of the shards and of the
tensor do not change. Checkpointing and collectives trust the metadata: the next save writes the wrong
columns or fails.

Clauses: KEYED-060.
"""

import sys
import warnings

import torch
from torch import distributed
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer

warnings.simplefilter("ignore")
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)


def columns(value: float, *sizes: int) -> ShardedTensor:
    """Make a ShardedTensor of columns of the given sizes."""
    shards, start = [], 0
    for size in sizes:
        piece = torch.full((3, size), value)
        shards.append(Shard.from_tensor_and_offsets(piece, [0, start], 0))
        start += size
    return ShardedTensor._init_from_local_shards(shards, [3, start])


param = torch.nn.Parameter(torch.zeros(3, 4))
live = columns(0.0, 2, 2)
optimizer = KeyedOptimizer({"p": param}, {param: {"moment": live}}, [])
optimizer.load_state_dict({"state": {"p": {"moment": columns(1.0, 1, 3)}}})
held = [list(shard.tensor.shape) for shard in live.local_shards()]
seen = [list(shard.metadata.shard_sizes) for shard in live.local_shards()]
expected = f"metadata {held}, like the tensors"
defect = seen != held
distributed.destroy_process_group()
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
