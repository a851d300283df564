"""Values of state: their kinds, saved form, copies, and the error of a load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from numbers import Number
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

Path = list[Any]


def is_stateful(value: object) -> bool:
    """Return whether `value` follows PyTorch's stateful protocol (a tensor never does)."""
    return not isinstance(value, torch.Tensor) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def kind(value: object) -> str:
    """Return the name of the kind of a value: a load replaces a value only by one of the same kind."""
    if isinstance(value, ShardedTensor):
        return "ShardedTensor"
    if isinstance(value, DTensor):
        return "DTensor"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, Mapping):
        return "mapping"
    if is_stateful(value):
        return "stateful object"
    if isinstance(value, Number):
        return "number"
    return type(value).__name__


def extract(entry: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return an entry of the state as it is saved: live tensors, and stateful objects as their state."""
    shown: dict[Any, Any] = {}
    for key, value in entry.items():
        if isinstance(value, Mapping):
            shown[key] = extract(value)
        elif is_stateful(value):
            shown[key] = value.state_dict()
        else:
            shown[key] = value
    return shown


def layout(entry: Mapping[Any, Any]) -> frozenset[tuple[Any, ...]]:
    """Return the paths of all keys of an entry, which must not change after the first step."""
    paths: set[tuple[Any, ...]] = set()
    for key, value in entry.items():
        paths.add((key,))
        if isinstance(value, Mapping):
            paths.update((key, *path) for path in layout(value))
    return frozenset(paths)


def refusal(text: str, path: Path, expected: object, got: object) -> ValueError:
    """Return the error of a load, with the path, the expected value and the given value."""
    where = json.dumps(path, default=str)
    return ValueError(f"{text} for the path of {where}: expected {expected}, got {got}")


def clone(tree: Any) -> Any:
    """Return a deep copy of a tree of state; tensors are detached."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, Mapping):
        return {key: clone(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and type(tree) in (list, tuple):
        return type(tree)(clone(value) for value in tree)
    return deepcopy(tree)
