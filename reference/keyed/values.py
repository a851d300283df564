"""Values that state is made of: their kinds, their copies, and the error of a refused load."""

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
    """Whether `value` follows PyTorch's stateful protocol (a tensor never counts)."""
    return not isinstance(value, torch.Tensor) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def kind(value: object) -> str:
    """Say what sort of state `value` is: only like is loaded over like."""
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


def refusal(text: str, path: Path, expected: object, got: object) -> ValueError:
    """Build the error of a refused load: where, what was expected, what came."""
    where = json.dumps(path, default=str)
    return ValueError(f"{text} for the path of {where}: expected {expected}, got {got}")


def clone(tree: Any) -> Any:
    """Copy a tree of state so that nothing in it is shared with the original."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, Mapping):
        return {key: clone(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and type(tree) in (list, tuple):
        return type(tree)(clone(value) for value in tree)
    return deepcopy(tree)
