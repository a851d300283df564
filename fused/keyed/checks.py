"""What a load has to fulfil: like over like, and nothing broadcast, dropped, invented or cut."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from keyedopt.fused.bulk.bulk_fill import pairs
from keyedopt.fused.keyed.loading import Load, Path, Unchecked
from keyedopt.fused.keyed.values import is_stateful, kind, refusal


def check_state(live: dict[str, Any], new: object, load: Load) -> None:
    """Check all entries, by parameter key; those of the usual kind later, when they are written at once."""
    if not isinstance(new, Mapping):
        raise ValueError(f"The state is a mapping by parameter key, got {kind(new)}")

    def check_one_by_one(load: Load) -> None:
        for key, entry in live.items():
            check_entry(entry, new[key], (key,), load)

    values = pairs(live, new)
    if values is not None:
        load.unchecked.append(Unchecked(*values, check_one_by_one))
        return
    if live.keys() != new.keys():
        names = f"expected {sorted(live)}, got {sorted(new, key=str)}"
        if len(live) != len(new):
            raise ValueError(f"Different parameter count: {len(live)} vs {len(new)}: {names}")
        missing = next(key for key in live if key not in new)
        raise ValueError(f"Parameter {missing} not found: {names}")
    check_one_by_one(load)


def check_entry(live: Mapping[Any, Any], new: object, path: Path, load: Load) -> None:
    """Check a mapping against one that is to be loaded into it."""
    if not isinstance(new, Mapping):
        raise refusal("Different kind of state", path, "mapping", kind(new))
    if live.keys() != new.keys():
        text = f"Different state size: {len(live)} vs {len(new)}"
        if len(live) == len(new):
            text = f"State key {next(key for key in live if key not in new)} not found"
        raise refusal(text, path, list(live), list(new))
    for key, value in live.items():
        came = new[key]
        if type(value) is Tensor and type(came) is Tensor:
            check_tensor(value, came, (*path, key), load)
        elif isinstance(value, Mapping):
            check_entry(value, came, (*path, key), load)
        else:
            _check_value(live, key, came, (*path, key), load)


def _check_value(holder: Mapping[Any, Any], key: Any, new: Any, path: Path, load: Load) -> None:
    value = holder[key]
    if is_stateful(value):
        shown = value.state_dict()
        if isinstance(shown, Mapping) and not isinstance(new, Mapping):
            raise refusal("Different kind of state", path, kind(shown), kind(new))
        load.objects.append((value, new, path))
    elif kind(value) != kind(new):
        raise refusal("Different kind of state", path, kind(value), kind(new))
    elif isinstance(value, ShardedTensor):
        _check_shards(value, new, path, load)
    elif isinstance(value, DTensor):
        _check_dtensor(value, new, path, load)
    elif isinstance(value, Tensor):
        check_tensor(value, new, path, load)
    elif isinstance(holder, MutableMapping):
        load.values.append((holder, key, new))
    else:
        raise refusal("Read-only state", path, "a mapping that can be written", kind(holder))


def check_tensor(live: Tensor, new: Tensor, path: Path, load: Load) -> None:
    """Check a tensor that is to be filled: its shape, its layout, and that its dtype holds the values."""
    if live.shape != new.shape:
        raise refusal("Different shape", path, tuple(live.shape), tuple(new.shape))
    if live.layout is not new.layout:
        raise refusal("Different layout", path, live.layout, new.layout)
    if live.dtype is not new.dtype and not new.is_meta and not _holds(live.dtype, new):
        raise refusal("Different dtype, and values that it cannot hold", path, live.dtype, new)
    load.live.append(live)
    load.new.append(new)


def _holds(dtype: torch.dtype, value: Tensor) -> bool:
    """Whether values survive a conversion but for rounding: no fraction, sign or imaginary part is cut."""
    if value.is_complex() and not dtype.is_complex:
        return False
    taken = value.to(dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.equal(taken.to(value.dtype), value)
    return torch.equal(value.to_dense().isfinite(), taken.to_dense().isfinite())


# Sharded state. What is filled are the pieces on this rank.


def pieces(value: Tensor) -> list[Tensor]:
    """List the tensors on this rank that hold the data of `value`."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor.detach() for shard in value.local_shards()]
    if not isinstance(value, DTensor):
        return [value.detach()]
    local: Any = DTensor.to_local(value.detach())  # type: ignore[arg-type]
    # torchrec puts several shards of a table into one object.
    return list(local.local_shards()) if hasattr(local, "local_shards") else [local]


def _check_dtensor(live: DTensor, new: DTensor, path: Path, load: Load) -> None:
    if live.shape != new.shape:
        raise refusal("Different shape", path, tuple(live.shape), tuple(new.shape))
    if live.device_mesh != new.device_mesh:
        raise refusal("Different device mesh", path, live.device_mesh, new.device_mesh)
    if live.placements != new.placements:  # copying redistributes
        load.live.append(live)
        load.new.append(new)
        return
    have, came = pieces(live), pieces(new)
    _check_number(have, came, path)
    for mine, theirs in zip(have, came, strict=True):
        check_tensor(mine, theirs, path, load)


def _check_shards(live: ShardedTensor, new: ShardedTensor, path: Path, load: Load) -> None:
    """Check shard by shard; those of a table that is cut by columns may come in another width."""
    size, came = live.metadata().size, new.metadata().size
    if size != came:
        raise refusal("Different shape", path, tuple(size), tuple(came))
    shards, new_shards = live.local_shards(), new.local_shards()
    _check_number(shards, new_shards, path)
    wider = []
    for shard, other in zip(shards, new_shards, strict=True):
        have, got = shard.tensor.shape, other.tensor.shape
        if have == got:
            check_tensor(shard.tensor, other.tensor, path, load)
        elif len(have) == len(got) == 2 and have[0] == got[0]:
            wider.append(shard)
            load.live.append(shard.tensor)
            load.new.append(other.tensor)
        else:
            raise refusal("Different shape of a shard", path, tuple(have), tuple(got))
    if wider:
        load.reshapes.append(lambda: _resize(live, new))
        return
    places = [list(shard.metadata.shard_offsets) for shard in shards]
    others = [list(shard.metadata.shard_offsets) for shard in new_shards]
    if places != others:  # rows or columns would change places
        raise refusal("Different places of shards", path, places, others)


def _check_number(live: list[Any], new: list[Any], path: Path) -> None:
    if len(live) != len(new):
        raise refusal(f"Different number of shards {len(live)} vs {len(new)}", path, len(live), len(new))


def _resize(live: ShardedTensor, new: ShardedTensor) -> None:
    places = []
    for shard, other in zip(live.local_shards(), new.local_shards(), strict=True):
        if shard.tensor.shape != other.tensor.shape:
            shard.tensor.resize_(other.tensor.shape)
        places.append((shard.metadata, other.metadata))
    # Shards of other ranks changed their widths as well; the whole has its own record of them.
    places += zip(live.metadata().shards_metadata, new.metadata().shards_metadata, strict=False)
    for place, other_place in places:
        place.shard_sizes = list(other_place.shard_sizes)
        place.shard_offsets = list(other_place.shard_offsets)
