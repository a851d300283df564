"""Check, load and restore the members of wrappers and combinations, which may come from another library.

Each hook of a member fires once per event: `state_dict` is called only to save, and a load is undone from a
snapshot of the live state.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from keyedopt.reference.keyed.base import KeyedOptimizer
from keyedopt.reference.keyed.pending import ObjectLoad, PendingLoad, check_shapes_kept
from keyedopt.reference.keyed.shards import local_tensors
from keyedopt.reference.keyed.values import clone, extract, is_stateful

FLAG = "_save_param_groups"


def prepare_load(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], alone: bool = False
) -> PendingLoad:
    """Check a load of any keyed optimizer without writing anything.

    An optimizer of another library, or with its own `load_state_dict`, checks its state when it loads. If
    the optimizer is `alone` in the load, values may also be compared when they are written.
    """
    if getattr(type(optimizer), "load_state_dict", None) is KeyedOptimizer.load_state_dict:
        pending: PendingLoad = optimizer._prepare_load(state_dict)  # type: ignore[attr-defined]
        if not alone:
            pending.check()
        return pending
    return PendingLoad(stateful=[MemberLoad(optimizer, state_dict, [])])


def check_keyed(optimizer: object) -> None:
    """Raise ValueError if an object is not a keyed optimizer, for example a torch optimizer."""
    if not callable(getattr(optimizer, "save_param_groups", None)):
        hint = ""
        if isinstance(optimizer, torch.optim.Optimizer):
            hint = ": give its parameters keys with KeyedOptimizerWrapper"
        raise ValueError(f"{type(optimizer).__name__} is not a keyed optimizer{hint}")


def saves_groups(optimizer: Any) -> bool | None:
    """Return whether a keyed optimizer saves its groups; None if only its state dict shows this.

    A wrapper of another library may have an outdated flag, so the flags of the innermost optimizers decide.
    """
    inner = getattr(optimizer, "_optimizer", None)
    is_keyed = isinstance(inner, torch.optim.Optimizer) and hasattr(inner, "save_param_groups")
    members = [inner] if is_keyed else []
    if isinstance(getattr(optimizer, "optimizers", None), list):
        members = [member for _, member in optimizer.optimizers]
    if members:
        flags = {saves_groups(member) for member in members}
        return flags.pop() if len(flags) == 1 else None
    flag = getattr(optimizer, "defaults", {}).get(FLAG)
    return None if flag is None else bool(flag)


class MemberLoad(ObjectLoad):
    """The load of an optimizer of another library, which can be undone without calling `state_dict`."""

    def snapshot(self) -> Any:
        """Return a copy of the live state and groups. No hook fires."""
        groups = [_Snapshot(group) for group in self.target.param_groups]
        return _Snapshot(self.target.state), groups

    def load(self, new: Any) -> None:
        """Load `new`, a copy of the state, or raise any exception."""
        self.target.load_state_dict(new)
        live = self.target.state
        named = {key: live[param] for key, param in self.target.params.items() if param in live}
        seen = {key: extract(entry) for key, entry in named.items() if isinstance(entry, Mapping)}
        check_shapes_kept({"state": seen}, self.new, self.path)

    def restore(self, snapshot: Any) -> None:
        """Restore the live state and groups."""
        state, groups = snapshot
        state.restore(self.target.state)
        for group, saved in zip(self.target.param_groups, groups, strict=True):
            saved.restore(group)


@dataclass(init=False)
class _Snapshot:
    """A deep copy of a mapping of state or options, to restore the mapping in place."""

    values: dict[Any, Any]
    inside: list[tuple[Any, _Snapshot]]
    objects: list[tuple[Any, Any]]
    tensors: list[tuple[torch.Tensor, torch.Tensor]]

    def __init__(self, live: Mapping[Any, Any]) -> None:
        self.values = dict(live)
        found = self.values.values()
        self.inside = [(value, _Snapshot(value)) for value in found if isinstance(value, Mapping)]
        self.objects = [(value, clone(value.state_dict())) for value in found if is_stateful(value)]
        tensors = [piece for value in found if isinstance(value, torch.Tensor) for piece in _pieces(value)]
        self.tensors = [(piece, piece.detach().clone()) for piece in tensors]

    @torch.no_grad()
    def restore(self, live: Mapping[Any, Any]) -> None:
        for tensor, saved in self.tensors:
            if tensor.shape != saved.shape:  # a column-wise shard of another width
                tensor.resize_(saved.shape)
            tensor.copy_(saved)
        for value, saved in self.objects:
            value.load_state_dict(saved)
        for value, nested in self.inside:
            nested.restore(value)
        if isinstance(live, MutableMapping):  # a read-only view cannot be changed
            for key in live.keys() - self.values.keys():
                del live[key]
            live.update(self.values)


def _pieces(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors on this rank, not detached as by `local_tensors`."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value] if type(value) is torch.Tensor else local_tensors(value)
