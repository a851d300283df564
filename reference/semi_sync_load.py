"""Split the joint state of two optimizers, and check both parts before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from keyedopt.reference.keyed.foreign_members import prepare_load, saves_groups
from keyedopt.reference.keyed.groups import check_groups, group_keys, keys_by_id
from keyedopt.reference.keyed.pending import PendingLoad, check_tensor
from keyedopt.reference.keyed.values import Path, extract, kind, refusal
from keyedopt.reference.semi_sync_state import GLOBAL, GLOBAL_COUNTER, LOCAL, Members, extract_prefixed


def check_load(members: Members, state_dict: Mapping[str, Any], saves: bool) -> PendingLoad:
    """Return the writes of a load of both optimizers and the counters; see `KeyedOptimizer._check_load`."""
    members.check(saves)
    state = state_dict.get("state")
    if not isinstance(state, Mapping):
        raise ValueError(f"A state dict is a mapping with 'state', got {kind(state_dict)}")
    pending = PendingLoad()
    _check_counters(members, state, pending)
    local, outer = _split_state(members, state)
    if not outer and _no_global_step_yet(members, state):
        outer = _entries(members.outer)  # nothing to load, whether or not the state was initialized
    parts = [{**extract_prefixed(state_dict, prefix)} for prefix in (LOCAL, GLOBAL)]
    if saves or (saves_groups(members.local) is None and "param_groups" in state_dict):
        if "param_groups" not in state_dict:
            raise ValueError("Expected 'param_groups' beside 'state', got none")
        for part, groups in zip(parts, _split_groups(members, state_dict["param_groups"]), strict=True):
            part["param_groups"] = groups
    for name, optimizer, part, entries in zip(
        ("local", "global"), (members.local, members.outer), parts, (local, outer), strict=True
    ):
        try:
            pending.extend(prepare_load(optimizer, {**part, "state": entries}))
        except ValueError as error:
            raise ValueError(f"{error} (in the {name} optimizer)") from error
    return pending


def _check_counters(members: Members, state: Mapping[str, Any], pending: PendingLoad) -> None:
    for name, live in members.counters.items():
        found = list(_values(state, name))
        if not found:
            raise ValueError(f"Missing {name} step counter in checkpoint: got {sorted(state, key=str)}")
        for path, value in found:
            if not isinstance(value, torch.Tensor) or value.shape or value.dtype != torch.int64:
                raise refusal("Different kind of counter", path, "an int64 tensor ()", repr(value))
            if value < 0 or value != found[0][1]:
                raise refusal(f"Different {name}", path, int(found[0][1].clamp(min=0)), int(value))
        check_tensor(live, found[0][1], found[0][0], pending)


def _no_global_step_yet(members: Members, state: Mapping[str, Any]) -> bool:
    """Return whether neither the live optimizer nor the saved one has taken a global step."""
    came = [value for _, value in _values(state, GLOBAL_COUNTER)]
    return not any(int(value) for value in [*came, members.counters[GLOBAL_COUNTER]])


def _split_state(members: Members, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the entries of the local and of the global optimizer; raise ValueError for any others."""
    local_live, outer_live = _entries(members.local), _entries(members.outer)
    local: dict[str, Any] = {}
    outer: dict[str, Any] = {}
    for key, entry in state.items():
        if not isinstance(entry, Mapping):
            raise refusal("Different kind of state", [key], "mapping", kind(entry))
        for name in entry:
            if not str(name).startswith((LOCAL, GLOBAL)) and name not in members.counters:
                raise refusal(f"State key {name} not found", [key], [LOCAL, GLOBAL], list(entry))
        mine, theirs = (
            _stripped(entry, prefix, live.get(key, {}))
            for prefix, live in ((LOCAL, local_live), (GLOBAL, outer_live))
        )
        if mine or key in local_live:
            local[key] = mine
        if key in members.counters:
            continue
        if theirs or any(name in entry for name in members.counters):
            for name in members.counters:
                if name not in entry:
                    raise refusal(f"State key {name} not found", [key], list(members.counters), list(entry))
            outer[key] = theirs
        elif key not in local:
            raise ValueError(f"Parameter {key} not found: got an entry without any state")
    return local, outer


def _split_groups(members: Members, groups: Any) -> tuple[list[Any], list[Any]]:
    """Split groups by the keys of their parameters; if both have the keys, the local group comes first."""
    keys = keys_by_id(members.params())
    check_groups([*members.local.param_groups, *members.outer.param_groups], groups, keys, PendingLoad())
    waiting = list(groups)
    dealt: tuple[list[Any], list[Any]] = ([], [])
    for optimizer, part in zip((members.local, members.outer), dealt, strict=True):
        for number, group in enumerate(optimizer.param_groups):
            names = group_keys(group, number, keys)
            place = next(i for i, new in enumerate(waiting) if sorted(new["params"]) == names)
            part.append(waiting.pop(place))
    return dealt


def _entries(optimizer: Any) -> dict[str, Any]:
    keys = keys_by_id(optimizer.params)
    return {keys[id(param)]: extract(entry) for param, entry in optimizer.state.items()}


def _stripped(entry: Mapping[str, Any], prefix: str, live: Mapping[Any, Any]) -> dict[Any, Any]:
    names = {str(name): name for name in live}  # keys of state may be of any type
    return {names.get(name, name): value for name, value in extract_prefixed(entry, prefix).items()}


def _values(state: Mapping[str, Any], name: str) -> Iterator[tuple[Path, Any]]:
    for key, entry in state.items():
        if isinstance(entry, Mapping) and name in entry:
            yield [key, name], entry[name]
