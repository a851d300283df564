"""What is asked of keyed optimizers inside others; they may be of another library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from keyedopt.fused.keyed.base import FLAG, KeyedOptimizer
from keyedopt.fused.keyed.loading import Load


def ready_load(optimizer: Any, state_dict: Mapping[str, Any]) -> Load:
    """Check a load of any keyed optimizer; one of another library decides for itself when it is run."""
    if getattr(type(optimizer), "load_state_dict", None) is KeyedOptimizer.load_state_dict:
        load: Load = optimizer._ready_load(state_dict)
        return load
    return Load(objects=[(optimizer, state_dict, ())])


def check_keyed(optimizers: Iterable[object]) -> None:
    """Refuse what is no keyed optimizer, such as a plain one of torch."""
    for optimizer in optimizers:
        if not callable(getattr(optimizer, "save_param_groups", None)):
            plain = isinstance(optimizer, torch.optim.Optimizer)
            hint = ": give its parameters keys with KeyedOptimizerWrapper" if plain else ""
            raise ValueError(f"{type(optimizer).__name__} is not a keyed optimizer{hint}")


def saves_groups(optimizer: Any) -> bool:
    """Whether a keyed optimizer saves its groups."""
    if isinstance(optimizer, KeyedOptimizer):
        return bool(getattr(optimizer, "defaults", {}).get(FLAG, False))
    saved = optimizer.state_dict()  # elsewhere the flag of a wrapper may be out of date
    return isinstance(saved, Mapping) and "param_groups" in saved
