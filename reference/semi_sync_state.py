"""The joint state of a local and a global optimizer.

The entry of a parameter contains the state of the local optimizer under keys that begin with
``semi_sync_local_``, and the state of the global optimizer under keys that begin with ``semi_sync_global_``.
An entry with global state also contains both step counters, with the same values in each entry:
``__semisync_local_step_counter__`` and ``__semisync_global_step_counter__``. This is torchrec's format, so
checkpoints can be exchanged with torchrec.

If the global optimizer has no state (before its first step, or always), each counter is an entry under its
own key. torchrec loses the counters then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from keyedopt.reference.keyed.foreign_members import saves_groups

LOCAL = "semi_sync_local_"
GLOBAL = "semi_sync_global_"
LOCAL_COUNTER = "__semisync_local_step_counter__"
GLOBAL_COUNTER = "__semisync_global_step_counter__"

Counters = dict[str, torch.Tensor]

_ONE_SAVES = "Only one of the optimizers saves its groups: call save_param_groups on the whole"


def add_prefix(entry: Mapping[Any, Any], prefix: str) -> dict[str, Any]:
    """Return an entry with a prefix in front of every key."""
    return {f"{prefix}{key}": value for key, value in entry.items()}


def extract_prefixed(entry: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values whose keys have the prefix, under keys without the prefix."""
    with_prefix = [key for key in entry if isinstance(key, str) and key.startswith(prefix)]
    return {key.removeprefix(prefix): entry[key] for key in with_prefix}


@dataclass
class Members:
    """The local and the global optimizer, and their step counters.

    Args:
        local: the local optimizer.
        outer: the global optimizer.
        counters: the live counters by their keys.
    """

    local: Any
    outer: Any
    counters: Counters

    def params(self) -> dict[str, Any]:
        """Return all parameters by key, and the counters."""
        return {**self.local.params, **self.outer.params, **self.counters}

    def overlap(self) -> bool:
        """Return whether a parameter is in groups of both optimizers."""
        one, other = (
            {id(param) for group in optimizer.param_groups for param in group["params"]}
            for optimizer in (self.local, self.outer)
        )
        return bool(one & other)

    def check(self, saves: bool) -> None:
        """Raise ValueError unless each parameter has one key, and all agree about saving groups."""
        owners: dict[str, Any] = {}
        keys: dict[int, str] = {}
        for optimizer in (self.local, self.outer):
            for key, param in optimizer.params.items():
                if owners.setdefault(key, param) is not param:
                    raise ValueError(
                        f"Parameter key {key!r} exists in both optimizers but points to different tensors"
                    )
                if keys.setdefault(id(param), key) != key:
                    raise ValueError(f"One parameter has two keys: {keys[id(param)]} and {key}")
                if key in self.counters:
                    raise ValueError(f"The parameter key {key} is that of a step counter")
            if saves_groups(optimizer) not in (saves, None) and hasattr(optimizer, "defaults"):
                raise ValueError(_ONE_SAVES)

    def state(self) -> dict[Any, dict[str, Any]]:
        """Return the joint state by parameter."""
        return self._joined(self.local.state, self.outer.state, {c: c for c in self.counters.values()})

    def _joined(self, local: Any, outer: Any, own: Mapping[Any, Any]) -> dict[Any, dict[str, Any]]:
        joined = {key: add_prefix(entry, LOCAL) for key, entry in local.items()}
        for key, entry in outer.items():
            joined.setdefault(key, {}).update({**add_prefix(entry, GLOBAL), **self.counters})
        if not outer:
            for key, (name, counter) in zip(own, self.counters.items(), strict=True):
                joined[key] = {name: counter}
        return joined

    def save(self, saves: bool) -> dict[str, Any]:
        """Return the joint state dict of both optimizers."""
        self.check(saves)
        parts = [dict(self.local.state_dict()), dict(self.outer.state_dict())]
        states = [part.pop("state") for part in parts]
        found = ["param_groups" in part for part in parts]  # a foreign optimizer may have no flag
        if any(found) and not (saves or all(found)):
            raise ValueError(_ONE_SAVES)
        groups = [group for part in parts for group in part.pop("param_groups", ())]
        rest = {**add_prefix(parts[0], LOCAL), **add_prefix(parts[1], GLOBAL)}  # entries that hooks added
        saved = {"state": self._joined(states[0], states[1], self.counters), **rest}
        return {**saved, "param_groups": groups} if saves or any(found) else saved
