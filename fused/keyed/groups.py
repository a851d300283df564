"""Parameter groups under the keys of their parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping
from copy import deepcopy
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.keyed.checks import check_tensor
from keyedopt.fused.keyed.loading import Load, Path
from keyedopt.fused.keyed.values import kind, refusal

Group = Mapping[str, Any]


def check_keys(groups: Collection[Group], keys: Mapping[int, str]) -> None:
    """See that every parameter in a group has a key; `keys` is by identity."""
    for number, group in enumerate(groups):
        if not all(map(keys.__contains__, map(id, group["params"]))):
            param = next(param for param in group["params"] if id(param) not in keys)
            raise ValueError(
                f"A parameter of group {number}, of shape {tuple(param.shape)}, has no key: "
                "whatever the optimizer changes needs one"
            )


def keys_of(group: Group, keys: Mapping[int, str]) -> list[str]:
    """Return the keys of a group's parameters, sorted."""
    return sorted(keys[id(param)] for param in group["params"])


def show_groups(groups: Collection[Group], keys: Mapping[int, str]) -> list[dict[str, Any]]:
    """Copy groups, with keys for parameters; options are deep copies, a record of this moment."""
    shown = []
    for group in groups:
        options = {name: deepcopy(option) for name, option in group.items() if name != "params"}
        shown.append({"params": keys_of(group, keys), **options})
    return shown


def by_keys(groups: object) -> dict[tuple[str, ...], list[Group]]:
    """Sort saved groups by the keys of their parameters; several may have the same, and keep their order.

    Raises:
        ValueError: this is no list of groups.
    """
    if not isinstance(groups, Collection) or isinstance(groups, Mapping | str):
        raise refusal("Different kind of param_groups", ["param_groups"], "a list of groups", kind(groups))
    found: dict[tuple[str, ...], list[Group]] = {}
    for number, group in enumerate(groups):
        names = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(names, Iterable) or isinstance(names, str):
            names = [None]
        names = list(names)
        if not all(isinstance(name, str) for name in names):
            expected = "a mapping with the keys of its parameters under 'params'"
            raise refusal("Malformed group", ["param_groups", number], expected, kind(group))
        found.setdefault(tuple(sorted(names)), []).append(group)
    return found


def check_groups(live: Collection[Group], new: object, keys: Mapping[int, str], load: Load) -> None:
    """Pair groups by the keys of their parameters, and check every option."""
    waiting, path = by_keys(new), ("param_groups",)
    number = sum(map(len, waiting.values()))
    if len(live) != number:
        text = f"Different param_groups count: {len(live)} vs {number}"
        raise refusal(text, path, len(live), number)
    for group in live:
        names = keys_of(group, keys)
        same = waiting.get(tuple(names))
        if not same:
            text = f"Group {'/'.join(names)} not found"
            raise refusal(text, path, names, [list(others) for others in waiting])
        _check_group(group, same.pop(0), "/".join(names), load)


def _check_group(live: Group, new: Group, name: str, load: Load) -> None:
    path = ("param_groups", name)
    if live.keys() != new.keys():
        text = f"Different param_group size: {len(live)} vs {len(new)}"
        if len(live) == len(new):
            text = f"Group key {next(key for key in live if key not in new)} not found for group {name}"
        raise refusal(text, path, sorted(live), sorted(new))
    for key in live.keys() - {"params"}:
        _check_option(live, key, new[key], (*path, key), load)


def _check_option(group: Group, key: str, new: Any, path: Path, load: Load) -> None:
    option = group[key]
    held = isinstance(option, Tensor)
    if held and option.dim() == 0 and isinstance(new, Number):
        new = torch.as_tensor(new, dtype=option.dtype)
    exact = held or isinstance(option, Number) or isinstance(new, Tensor)
    if exact and kind(option) != kind(new):
        raise refusal("Different kind of option", path, kind(option), kind(new))
    if held:  # it keeps its identity: a captured step reads that very tensor
        check_tensor(option, new, path, load)
    elif isinstance(group, MutableMapping):
        load.values.append((group, key, new))
    else:
        raise refusal("Read-only group", path, "a mapping that can be written", kind(group))


def take_apart(group: object, known: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the parameters of a new group by key, and its options; nothing is changed.

    Raises:
        ValueError: a parameter comes without key, or it or its key is in `known` or comes twice.
    """
    if not isinstance(group, Mapping) or "params" not in group:
        raise ValueError(f"A group is a mapping with 'params', got {kind(group)}")
    given = group["params"]
    if isinstance(given, Mapping):
        given = given.items()
    several = isinstance(given, Iterable) and not isinstance(given, Tensor)
    taken = set(map(id, known.values()))
    params: dict[str, Tensor] = {}
    for pair in given if several else [given]:
        if not (isinstance(pair, tuple) and list(map(_is, pair, (str, Tensor))) == [True, True]):
            raise ValueError(
                "The parameters of a group need keys: give a mapping from key to parameter, or "
                f"(key, parameter) pairs as named_parameters() yields; got {kind(pair)}"
            )
        key, param = pair
        if key in known or key in params:
            raise ValueError(f"Duplicate param key {key}")
        if id(param) in taken:
            raise ValueError(f"The parameter {key} is already there under another key")
        taken.add(id(param))
        params[key] = param
    return params, {name: option for name, option in group.items() if name != "params"}


def _is(value: object, cls: type) -> bool:
    return isinstance(value, cls)
