"""The state of a local and a global optimizer as one, in torchrec's form.

What the local optimizer keeps is under keys that begin with ``semi_sync_local_``, what the global one keeps
under ``semi_sync_global_``, and beside the latter, in every entry, are both counters. While the global
optimizer has no state, the counters have entries of their own, under their own keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.keyed.base import keys_by_id
from keyedopt.fused.keyed.checks import check_tensor
from keyedopt.fused.keyed.foreign_members import ready_load, saves_groups
from keyedopt.fused.keyed.groups import by_keys, check_groups, keys_of
from keyedopt.fused.keyed.loading import Load
from keyedopt.fused.keyed.values import kind, refusal, show

LOCAL = "semi_sync_local_"
GLOBAL = "semi_sync_global_"
LOCAL_COUNTER = "__semisync_local_step_counter__"
GLOBAL_COUNTER = "__semisync_global_step_counter__"


def prefixed(entry: Mapping[Any, Any], prefix: str) -> dict[str, Any]:
    """Put a prefix in front of every key."""
    return {f"{prefix}{key}": value for key, value in entry.items()}


def unprefixed(entry: Mapping[Any, Any], prefix: str) -> dict[str, Any]:
    """Take what has the prefix, without it."""
    size = len(prefix)
    return {key[size:]: v for key, v in entry.items() if isinstance(key, str) and key.startswith(prefix)}


@dataclass
class Members:
    """The two optimizers, and the counters of their steps by name."""

    local: Any
    outer: Any
    counters: dict[str, Tensor]

    @property
    def both(self) -> tuple[Any, Any]:
        """The local and the global optimizer."""
        return self.local, self.outer

    def params(self) -> dict[str, Any]:
        """Return all parameters by key, and the counters."""
        return {**self.local.params, **self.outer.params, **self.counters}

    def overlap(self) -> bool:
        """Whether both optimizers have a parameter in their groups."""
        one, other = ({id(p) for group in opt.param_groups for p in group["params"]} for opt in self.both)
        return not one.isdisjoint(other)

    def check(self, saves: bool) -> None:
        """Check that keys and parameters are one to one, and that both save their groups or do not."""
        by_key: dict[str, Any] = {}
        by_param: dict[int, str] = {}
        for optimizer in self.both:
            for key, param in optimizer.params.items():
                if by_key.setdefault(key, param) is not param:
                    text = "exists in both optimizers but points to different tensors"
                    raise ValueError(f"Parameter key {key!r} {text}")
                if by_param.setdefault(id(param), key) != key:
                    raise ValueError(f"One parameter has two keys: {by_param[id(param)]} and {key}")
                if key in self.counters:
                    raise ValueError(f"The parameter key {key} is that of a step counter")
            if hasattr(optimizer, "defaults") and saves_groups(optimizer) != saves:
                raise ValueError(
                    "Only one of the optimizers saves its groups: call save_param_groups on the whole"
                )

    def state(self) -> dict[Any, dict[str, Any]]:
        """Return the live state of both, by parameter."""
        return self._join(self.local.state, self.outer.state, {id_: id_ for id_ in self.counters.values()})

    def save(self, saves: bool) -> dict[str, Any]:
        """Return what both save, hooks included, as one."""
        self.check(saves)
        local, outer = (dict(optimizer.state_dict()) for optimizer in self.both)
        groups = [*local.pop("param_groups", ()), *outer.pop("param_groups", ())]
        state = self._join(local.pop("state"), outer.pop("state"), self.counters)
        saved = {"state": state, **prefixed(local, LOCAL), **prefixed(outer, GLOBAL)}
        return {**saved, "param_groups": groups} if saves else saved

    def _join(self, local: Any, outer: Any, own: Mapping[Any, Any]) -> dict[Any, dict[str, Any]]:
        joined = {key: prefixed(entry, LOCAL) for key, entry in local.items()}
        for key, entry in outer.items():
            joined.setdefault(key, {}).update({**prefixed(entry, GLOBAL), **self.counters})
        if not outer:
            joined.update(
                {key: {name: self.counters[name]} for key, name in zip(own, self.counters, strict=True)}
            )
        return joined

    def check_load(self, given: Mapping[str, Any], saves: bool) -> Load:
        """Check a load of both and of the counters; nothing is written."""
        self.check(saves)
        state, load = given["state"], Load()
        came = self._check_counters(state, load)
        local, outer = self._divide(state)
        if not outer and not came and not int(self.counters[GLOBAL_COUNTER]):
            outer = _live(
                self.outer
            )  # no global step here or there: state is made at the first, or was before
        parts: list[dict[str, Any]] = [
            {**unprefixed(given, LOCAL), "state": local},
            {**unprefixed(given, GLOBAL), "state": outer},
        ]
        if saves:
            if "param_groups" not in given:
                raise ValueError("Expected 'param_groups' beside 'state', got none")
            self._deal_groups(given["param_groups"], parts)
        for name, optimizer, part in zip(("local", "global"), self.both, parts, strict=True):
            where = f" (in the {name} optimizer)"
            try:
                found = ready_load(optimizer, part)
            except ValueError as error:
                raise ValueError(f"{error}{where}") from error
            found.explain(where)
            load.extend(found)
        return load

    def _check_counters(self, state: Mapping[str, Any], load: Load) -> int:
        """Check that a counter is the same wherever it is; return that of the global steps."""
        steps = {}
        for name, live in self.counters.items():
            found = [(key, e[name]) for key, e in state.items() if isinstance(e, Mapping) and name in e]
            if not found:
                raise ValueError(f"Missing {name} step counter in checkpoint: got {sorted(state, key=str)}")
            for key, value in found:
                if not isinstance(value, Tensor) or value.shape or value.dtype != torch.int64:
                    raise refusal("Different kind of counter", [key, name], "an int64 tensor ()", repr(value))
            numbers = torch.stack([value.cpu() for _, value in found]).tolist()
            for (key, _), number in zip(found, numbers, strict=True):
                if number < 0 or number != numbers[0]:
                    raise refusal(f"Different {name}", [key, name], max(numbers[0], 0), number)
            check_tensor(live, found[0][1], (found[0][0], name), load)
            steps[name] = numbers[0]
        return int(steps[GLOBAL_COUNTER])

    def _divide(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Give each optimizer its entries, and refuse what is of neither."""
        live_local, live_outer = map(_live, self.both)
        local: dict[str, Any] = {}
        outer: dict[str, Any] = {}
        for key, entry in state.items():
            if not isinstance(entry, Mapping):
                raise refusal("Different kind of state", [key], "mapping", kind(entry))
            for name in entry:
                if name not in self.counters and not str(name).startswith((LOCAL, GLOBAL)):
                    raise refusal(f"State key {name} not found", [key], [LOCAL, GLOBAL], list(entry))
            mine = _strip(entry, LOCAL, live_local.get(key))
            theirs = _strip(entry, GLOBAL, live_outer.get(key))
            if mine or key in live_local:
                local[key] = mine
            if key in self.counters:
                continue
            missing = [name for name in self.counters if name not in entry]
            if theirs or len(missing) < len(self.counters):
                if missing:
                    text = f"State key {missing[0]} not found"
                    raise refusal(text, [key], list(self.counters), list(entry))
                outer[key] = theirs
            elif key not in local:
                raise ValueError(f"Parameter {key} not found: got an entry without any state")
        return local, outer

    def _deal_groups(self, groups: Any, parts: list[dict[str, Any]]) -> None:
        """Deal groups by the keys of their parameters; of equal ones the local optimizer's come first."""
        keys = keys_by_id(self.params())
        check_groups([group for opt in self.both for group in opt.param_groups], groups, keys, Load())
        waiting = by_keys(groups)
        for optimizer, part in zip(self.both, parts, strict=True):
            part["param_groups"] = [
                waiting[tuple(keys_of(group, keys))].pop(0) for group in optimizer.param_groups
            ]


def _live(optimizer: Any) -> dict[str, Any]:
    keys = keys_by_id(optimizer.params)
    return {keys[id(param)]: show(entry) for param, entry in optimizer.state.items()}


def _strip(entry: Mapping[Any, Any], prefix: str, live: Mapping[Any, Any] | None) -> dict[Any, Any]:
    """Take what has the prefix, under the keys that the live state has: they may be no text."""
    found = unprefixed(entry, prefix)
    if not live or found.keys() == live.keys():
        return found
    names = {str(name): name for name in live}
    return {names.get(name, name): value for name, value in found.items()}
