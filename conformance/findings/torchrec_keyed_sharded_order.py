"""Local shards that are loaded in another order are exchanged, and with them columns of the state.

Shards are filled by position, whatever their offsets; every shape fits, so no error is raised, and each
shard then contains the state of other columns than its metadata says.

Clauses: KEYED-111.
"""

import sys
import warnings

import torch
from torch import distributed
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer

warnings.simplefilter("ignore")
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)


def columns(*numbers: int) -> ShardedTensor:
    """Make a ShardedTensor of shards of two columns that are filled with their places."""
    shards = [
        Shard.from_tensor_and_offsets(torch.full((3, 2), float(number)), [0, 2 * number], 0)
        for number in numbers
    ]
    return ShardedTensor._init_from_local_shards(shards, [3, 4])


param = torch.nn.Parameter(torch.zeros(3, 4))
live = columns(0, 1)
optimizer = KeyedOptimizer({"p": param}, {param: {"moment": live}}, [])
optimizer.load_state_dict({"state": {"p": {"moment": columns(1, 0)}}})
seen = {shard.metadata.shard_offsets[1]: float(shard.tensor.mean()) for shard in live.local_shards()}
expected = "0 in the columns from 0 on, and 1 in those from 2 on"
defect = seen != {0: 0.0, 2: 1.0}
distributed.destroy_process_group()
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
