"""Parameter groups, identified by the keys of their parameters instead of by position."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping
from copy import deepcopy
from numbers import Number
from typing import Any

import torch

from keyedopt.reference.keyed.pending import PendingLoad, check_tensor
from keyedopt.reference.keyed.values import kind, refusal


def keys_by_id(params: Mapping[str, torch.Tensor]) -> dict[int, str]:
    """Return the key of each parameter by the id of the parameter."""
    return {id(param): key for key, param in params.items()}


def check_keys(group: Mapping[str, Any], number: int, keys: Mapping[int, str]) -> None:
    """Raise ValueError if a parameter of a group has no key."""
    for position, param in enumerate(group["params"]):
        if id(param) not in keys:
            raise ValueError(
                f"Parameter {position} of group {number}, of shape {tuple(param.shape)}, "
                "has no key: give every parameter that the optimizer changes a key"
            )


def group_keys(group: Mapping[str, Any], number: int, keys: Mapping[int, str]) -> list[str]:
    """Return the keys of a group's parameters, sorted."""
    check_keys(group, number, keys)
    return sorted(keys[id(param)] for param in group["params"])


def save_groups(groups: Collection[Mapping[str, Any]], keys: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return groups with keys in place of parameters, and copies of their options."""
    return [
        {"params": group_keys(group, number, keys)}
        | {key: deepcopy(value) for key, value in group.items() if key != "params"}
        for number, group in enumerate(groups)
    ]


def check_groups(
    live: Collection[Mapping[str, Any]], new: object, keys: Mapping[int, str], pending: PendingLoad
) -> None:
    """Match groups by their sets of keys (equal sets in order), and check their options."""
    path = ["param_groups"]
    if not isinstance(new, Collection) or isinstance(new, Mapping | str):
        raise refusal("Different kind of param_groups", path, "a list of groups", kind(new))
    if len(live) != len(new):
        text = f"Different param_groups count: {len(live)} vs {len(new)}"
        raise refusal(text, path, len(live), len(new))
    waiting: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for number, group in enumerate(new):
        if not isinstance(group, Mapping) or not _is_names(group.get("params")):
            expected = "a mapping with the keys of its parameters under 'params'"
            raise refusal("Malformed group", [*path, number], expected, kind(group))
        waiting.setdefault(tuple(sorted(group["params"])), []).append(group)
    for number, group in enumerate(live):
        names = group_keys(group, number, keys)
        candidates = waiting.get(tuple(names))
        if not candidates:
            text = f"Group {'/'.join(names)} not found"
            raise refusal(text, path, names, [list(found) for found in waiting])
        _check_group(group, candidates.pop(0), names, pending)


def _is_names(names: object) -> bool:
    return (
        isinstance(names, Iterable)
        and not isinstance(names, str)
        and all(isinstance(name, str) for name in names)
    )


def _check_group(
    live: Mapping[str, Any], new: Mapping[str, Any], names: list[str], pending: PendingLoad
) -> None:
    path = ["param_groups", "/".join(names)]
    if len(live) != len(new):
        text = f"Different param_group size: {len(live)} vs {len(new)}"
        raise refusal(text, path, sorted(live), sorted(new))
    for key in live:
        if key not in new:
            text = f"Group key {key} not found for group {'/'.join(names)}"
            raise refusal(text, path, sorted(live), sorted(new))
    for key, value in live.items():
        if key != "params":
            _check_option(live, key, value, new[key], [*path, key], pending)


def _check_option(
    live: Mapping[str, Any], key: str, value: Any, new: Any, path: list[Any], pending: PendingLoad
) -> None:
    if isinstance(value, torch.Tensor):  # a learning rate that is a tensor stays the same tensor
        if isinstance(new, Number) and value.dim() == 0:
            new = torch.as_tensor(new, dtype=value.dtype)
        if not isinstance(new, torch.Tensor):
            raise refusal("Different kind of option", path, kind(value), kind(new))
        check_tensor(value, new, path, pending)
        return
    if (isinstance(value, Number) or isinstance(new, torch.Tensor)) and kind(value) != kind(new):
        raise refusal("Different kind of option", path, kind(value), kind(new))
    if not isinstance(live, MutableMapping):
        raise refusal("Read-only group", path, "a mapping that can be written", kind(live))
    pending.values.append((live, key, new))


def keyed_parameters(
    param_group: object, known: Mapping[str, torch.Tensor], groups: Iterable[Mapping[str, Any]] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the parameters of a new group by key, and its options. Nothing is changed.

    Parameters that have a key but are in none of the groups, such as frozen ones, need no key again.
    """
    if not isinstance(param_group, Mapping) or "params" not in param_group:
        raise ValueError(f"A group is a mapping with 'params', got {kind(param_group)}")
    given = param_group["params"]
    grouped = {id(param) for group in groups for param in group["params"]}
    names = {id(param): key for key, param in known.items()}
    free = {param: key for param, key in names.items() if param not in grouped}
    params: dict[str, torch.Tensor] = {}
    for key, param in _pairs(given.items() if isinstance(given, Mapping) else given, free):
        if key in params or (key in known and free.get(id(param)) != key):
            raise ValueError(f"Duplicate param key {key}")
        if names.get(id(param), key) != key or any(param is other for other in params.values()):
            raise ValueError(f"The optimizer already has the parameter {key} under another key")
        params[key] = param
    return params, {key: value for key, value in param_group.items() if key != "params"}


def _pairs(given: object, free: Mapping[int, str]) -> list[tuple[str, torch.Tensor]]:
    several = isinstance(given, Iterable) and not isinstance(given, torch.Tensor)
    pairs = []
    for pair in given if several else [given]:  # type: ignore[attr-defined]
        match pair:
            case (str() as key, torch.Tensor() as param):
                pairs.append((key, param))
            case torch.Tensor() if id(pair) in free:
                pairs.append((free[id(pair)], pair))
            case _:
                raise ValueError(
                    "The parameters of a group need keys: give a mapping from key to parameter, "
                    f"or (key, parameter) pairs as named_parameters() yields; got {kind(pair)}"
                )
    return pairs


def check_construction(params: Mapping[str, torch.Tensor], state: Mapping[Any, Any]) -> None:
    """Raise ValueError unless each parameter has one key, and all state belongs to parameters."""
    known = {id(param): key for key, param in params.items()}
    unknown = [key for key in state if id(key) not in known]
    if unknown:
        raise ValueError(f"All state keys must be params. The following keys are not: {unknown}.")
    for key, param in params.items():
        if known[id(param)] != key:
            raise ValueError(f"One parameter has two keys: {key} and {known[id(param)]}")
    for param, entry in state.items():
        if not isinstance(entry, Mapping):
            raise ValueError(f"The state of {known[id(param)]} must be a mapping, not {kind(entry)}")
