"""Check state that is to be loaded against the live state.

A load replaces a value only by one of the same kind: a tensor by a tensor of the same shape, a mapping by a
mapping with the same keys. Stateful objects load their own state. All types of numbers are one kind.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from keyedopt.reference.keyed.pending import ObjectLoad, PendingLoad, check_tensor
from keyedopt.reference.keyed.shards import check_dtensor, check_sharded_tensor
from keyedopt.reference.keyed.values import Path, is_stateful, kind, layout, refusal


def check_parameter_keys(live: Mapping[str, Any], new: Mapping[Any, Any]) -> None:
    """Raise ValueError unless the live and the new state belong to parameters of the same keys."""
    if len(live) != len(new):
        advice = "" if live else "; call init_state() first: a fresh optimizer has no state to load into"
        raise ValueError(
            f"Different parameter count: {len(live)} vs {len(new)}: "
            f"expected {sorted(live)}, got {sorted(new, key=str)}{advice}"
        )
    for key in live:
        if key not in new:
            raise ValueError(f"Parameter {key} not found: got {sorted(new, key=str)}")


def check_entries(live: Mapping[str, Any], new: Mapping[Any, Any], pending: PendingLoad) -> None:
    """Check all entries to be loaded, by parameter key."""
    for key, entry in live.items():
        check_entry(entry, new[key], [key], pending)


def check_entry(live: Mapping[Any, Any], new: object, path: Path, pending: PendingLoad) -> None:
    """Check a mapping to be loaded, with all its values, against the live mapping."""
    if not isinstance(new, Mapping):
        raise refusal("Different kind of state", path, "mapping", kind(new))
    if len(live) != len(new):
        raise refusal(f"Different state size: {len(live)} vs {len(new)}", path, list(live), list(new))
    for key in live:
        if key not in new:
            raise refusal(f"State key {key} not found", path, list(live), list(new))
    for key, value in live.items():
        if isinstance(value, Mapping):
            check_entry(value, new[key], [*path, key], pending)
        else:
            check_value(live, key, new[key], [*path, key], pending)


def check_value(live: Mapping[Any, Any], key: Any, new: Any, path: Path, pending: PendingLoad) -> None:
    """Check one value of the state and record how to write it."""
    value = live[key]
    if is_stateful(value):
        shown = value.state_dict()
        if isinstance(shown, Mapping) and not isinstance(new, Mapping):
            raise refusal("Different kind of state", path, kind(shown), kind(new))
        pending.stateful.append(ObjectLoad(value, new, path))
        return
    if kind(value) != kind(new):
        raise refusal("Different kind of state", path, kind(value), kind(new))
    if isinstance(value, ShardedTensor):
        check_sharded_tensor(value, new, path, pending)
    elif isinstance(value, DTensor):
        check_dtensor(value, new, path, pending)
    elif isinstance(value, torch.Tensor):
        check_tensor(value, new, path, pending)
    elif isinstance(live, MutableMapping):
        pending.values.append((live, key, new))
    else:
        raise refusal("Read-only state", path, "a mapping that can be written", kind(live))


def check_layouts(first: dict[str, frozenset[Any]], entries: Mapping[str, Any]) -> None:
    """Raise RuntimeError if the keys of a parameter's state have changed since its first step."""
    for key, entry in entries.items():
        now = layout(entry)
        had = first.setdefault(key, now) if now else now
        if now != had:
            changed = sorted(".".join(map(str, path)) for path in now ^ had)
            raise RuntimeError(
                f"The state of {key} must be complete after its first step, but these keys were "
                f"added or removed later: {changed}"
            )
