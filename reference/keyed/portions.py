"""Merge the state dicts of the members of a combination, and split one to load it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from keyedopt.reference.keyed.groups import group_keys
from keyedopt.reference.keyed.views import prepend_key, strip_keys

#: The key of an optimizer, the optimizer, and the state dict that it will load.
Portion = tuple[str, Any, dict[str, Any]]


def merge(into: dict[str, Any], part: Mapping[str, Any], prefix: str) -> None:
    """Add the entries of `part` under keys with a prefix; raise ValueError if a key exists."""
    for name, entry in part.items():
        key = prepend_key(name, prefix)
        if key in into:
            raise ValueError(f"Duplicate param key {key}")
        into[key] = entry


def rename_group(group: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return a saved group with the keys that its parameters have in the combination."""
    return {**group, "params": sorted(prepend_key(name, prefix) for name in group["params"])}


def split_state(parts: Sequence[tuple[str, Any]], state_dict: Mapping[str, Any]) -> list[Portion]:
    """Return the part of a state dict that each optimizer loads, under the optimizer's own keys."""
    portions: list[Portion] = []
    for prefix, optimizer in parts:
        part: dict[str, Any] = {"state": {}}
        for key in state_dict.keys() - {"state", "param_groups"}:
            part |= dict.fromkeys(strip_keys([key], prefix), state_dict[key])
        portions.append((prefix, optimizer, part))
    owners = {
        prepend_key(name, prefix): (number, name)
        for number, (prefix, optimizer) in enumerate(parts)
        for name in optimizer.params
    }
    for key, entry in state_dict["state"].items():
        number, name = owners.get(key) or _longest_prefix(parts, key)
        portions[number][2]["state"][name] = entry
    return portions


def _longest_prefix(parts: Sequence[tuple[str, Any]], key: str) -> tuple[int, str]:
    """Return the number of the optimizer with the longest prefix of a key, and the rest of the key."""
    fits = [
        (len(prefix), number, name)
        for number, (prefix, _) in enumerate(parts)
        for name in strip_keys([key], prefix)
    ]
    if not fits:
        raise ValueError(f"None of the combined optimizers has the parameter {key}")
    return max(fits)[1:]


def split_groups(portions: Sequence[Portion], groups: Collection[Mapping[str, Any]]) -> None:
    """Add to each portion the groups of its parameters; `check_groups` has checked that all match."""
    waiting: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for group in groups:
        waiting.setdefault(tuple(sorted(group["params"])), []).append(group)
    for prefix, optimizer, part in portions:
        keys = {id(param): prepend_key(name, prefix) for name, param in optimizer.params.items()}
        live = [group_keys(group, number, keys) for number, group in enumerate(optimizer.param_groups)]
        part["param_groups"] = [
            {**waiting[tuple(names)].pop(0), "params": strip_keys(names, prefix)} for names in live
        ]
