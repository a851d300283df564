"""Trees of state: what a value is, how it is shown, how it is copied."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from numbers import Number
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from keyedopt.fused.bulk import native

#: Types that are shown as they are; whatever else there is gets a closer look.
PLAIN = frozenset({Tensor, torch.nn.Parameter, int, float, bool, str, NoneType})
_IMMUTABLE = PLAIN - {Tensor, torch.nn.Parameter}
#: What is loaded over the same only, the more special first.
_NAMES = {ShardedTensor: "ShardedTensor", DTensor: "DTensor", Tensor: "tensor", Mapping: "mapping"}


def are_plain(entries: Collection[Mapping[Any, Any]]) -> bool:
    """Whether all are dicts without a mapping, a stateful object or a special kind of tensor in them."""
    return {dict}.issuperset(map(type, entries)) and PLAIN.issuperset(map(type, values_of(entries)))


def values_of(entries: Collection[Any]) -> chain[Any]:
    """Run through the values of dicts, one after the other."""
    return chain.from_iterable(map(dict.values, entries))


def is_stateful(value: object) -> bool:
    """Whether `value` has `state_dict` and `load_state_dict`, and is no tensor."""
    if isinstance(value, Tensor):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def kind(value: object) -> str:
    """Name what a value is; a load replaces like by like."""
    for cls, name in _NAMES.items():
        if isinstance(value, cls):
            return name
    if is_stateful(value):
        return "stateful object"
    return "number" if isinstance(value, Number) else type(value).__name__


def refusal(text: str, path: Sequence[Any], expected: object, got: object) -> ValueError:
    """Make the error of a refused load, with the place, what it needs and what came."""
    place = json.dumps(list(path), default=str)
    return ValueError(f"{text} for the path of {place}: expected {expected}, got {got}")


def show_all(entries: Collection[Any]) -> list[dict[Any, Any]]:
    """Copy the mappings of entries, with stateful objects as their state; tensors are the live ones."""
    if native is not None:
        copied: list[dict[Any, Any]] | None = native.copies(list(entries), tuple(PLAIN))
        return list(map(show, entries)) if copied is None else copied
    return list(map(dict.copy, entries)) if are_plain(entries) else list(map(show, entries))


def show(entry: Mapping[Any, Any]) -> dict[Any, Any]:
    """Do what `show_all` does for one entry."""
    return {key: _shown(value) for key, value in entry.items()}


def _shown(value: Any) -> Any:
    if isinstance(value, Mapping):
        return show(value)
    return value.state_dict() if is_stateful(value) else value


def layouts(entries: Collection[Mapping[Any, Any]]) -> list[tuple[Any, ...]]:
    """List the keys of each entry, in their order, and the paths of those that are nested."""
    return list(map(tuple, entries)) if are_plain(entries) else list(map(_layout, entries))


def _layout(entry: Mapping[Any, Any]) -> tuple[Any, ...]:
    paths: list[Any] = []
    for key, value in entry.items():
        paths.append(key)
        if isinstance(value, Mapping):
            paths += [_Path((key, *(path if type(path) is _Path else (path,)))) for path in _layout(value)]
    return tuple(paths)


class _Path(tuple[Any, ...]):
    """The keys that lead to a nested value; a key may itself be a tuple."""

    def __str__(self) -> str:
        return ".".join(map(str, self))


def clone(tree: Any) -> Any:
    """Copy a tree of state, so that nothing in it is shared with the original."""
    if type(tree) in _IMMUTABLE:
        return tree
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, Mapping):
        return {key: clone(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(clone, tree))
    return deepcopy(tree)
