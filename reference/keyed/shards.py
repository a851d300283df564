"""Check the local shards of a distributed tensor before a load fills them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from keyedopt.reference.keyed.pending import PendingLoad, check_tensor
from keyedopt.reference.keyed.values import refusal


def local_tensors(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that contain the data of `value` on this rank."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor.detach() for shard in value.local_shards()]
    if isinstance(value, DTensor):
        local: torch.Tensor = DTensor.to_local(value.detach())  # type: ignore[arg-type]
        return list(local.local_shards()) if hasattr(local, "local_shards") else [local]
    return [value.detach()]


def check_count(live: list[Any], new: list[Any], path: list[Any]) -> None:
    """Raise ValueError unless the numbers of local shards are equal."""
    if len(live) != len(new):
        text = f"Different number of shards {len(live)} vs {len(new)}"
        raise refusal(text, path, len(live), len(new))


def check_sharded_tensor(
    live: ShardedTensor, new: ShardedTensor, path: list[Any], pending: PendingLoad
) -> None:
    """Check a ShardedTensor; only column-wise shards may differ in width."""
    whole, new_whole = live.metadata().size, new.metadata().size
    if whole != new_whole:
        raise refusal("Different shape", path, tuple(whole), tuple(new_whole))
    check_count(live.local_shards(), new.local_shards(), path)
    resized = False
    for shard, new_shard in zip(live.local_shards(), new.local_shards(), strict=True):
        have, got = shard.tensor.shape, new_shard.tensor.shape
        if have == got:
            check_tensor(shard.tensor, new_shard.tensor, path, pending)
        elif len(have) == len(got) == 2 and have[0] == got[0]:
            resized = True
            pending.copy(shard.tensor, new_shard.tensor)
        else:
            raise refusal("Different shape of a shard", path, tuple(have), tuple(got))
    if resized:
        pending.reshapes.append(lambda: _resize(live, new))
        return
    offsets, new_offsets = (
        [list(shard.metadata.shard_offsets) for shard in each.local_shards()] for each in (live, new)
    )
    if offsets != new_offsets:  # a copy shard by shard would move columns
        raise refusal("Different offsets of shards", path, offsets, new_offsets)


def _resize(live: ShardedTensor, new: ShardedTensor) -> None:
    for shard, new_shard in zip(live.local_shards(), new.local_shards(), strict=True):
        if shard.tensor.shape != new_shard.tensor.shape:
            shard.tensor.resize_(new_shard.tensor.shape)
        _move(shard.metadata, new_shard.metadata)
    # The shards of other ranks have changed their widths, too: update the global metadata.
    old_shards, new_shards = live.metadata().shards_metadata, new.metadata().shards_metadata
    for old, placed in zip(old_shards, new_shards, strict=False):
        _move(old, placed)


def _move(live: Any, new: Any) -> None:
    live.shard_sizes = list(new.shard_sizes)
    live.shard_offsets = list(new.shard_offsets)


def check_dtensor(live: DTensor, new: DTensor, path: list[Any], pending: PendingLoad) -> None:
    """Check a DTensor: the global shape, and with equal placements the local shapes."""
    if live is new:  # torch.distributed.checkpoint has filled it
        return
    if live.shape != new.shape:
        raise refusal("Different shape", path, tuple(live.shape), tuple(new.shape))
    if live.device_mesh != new.device_mesh:
        raise refusal("Different device mesh", path, live.device_mesh, new.device_mesh)
    if live.placements != new.placements:
        pending.redistributed.append((path, live, new))
        return
    pieces, new_pieces = local_tensors(live), local_tensors(new)
    check_count(pieces, new_pieces, path)
    for piece, new_piece in zip(pieces, new_pieces, strict=True):
        check_tensor(piece, new_piece, path, pending)
