"""Several keyed optimizers as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from keyedopt.fused.keyed.base import FLAG, KeyedOptimizer, keys_by_id
from keyedopt.fused.keyed.composition import Composition, Portion
from keyedopt.fused.keyed.foreign_members import check_keyed, saves_groups
from keyedopt.fused.keyed.groups import by_keys, check_groups, keys_of, take_apart
from keyedopt.fused.keyed.loading import Load
from keyedopt.fused.keyed.views import prepend, strip

KeyedPair = tuple[str, KeyedOptimizer]


class CombinedOptimizer(Composition):
    """Keyed optimizers that step, are saved and are loaded together.

    Args:
        optims: the optimizers, each alone or as ``(key, optimizer)``; the key, with a dot, goes in front
            of its parameters' keys.

    Raises:
        ValueError: two parameters with one key, a parameter in two optimizers, or some of the optimizers
            save their groups and some do not.
    """

    def __init__(self, optims: Iterable[KeyedOptimizer | KeyedPair]) -> None:
        super().__init__()
        pairs: list[Any] = [(item if _is_pair(item) else ("", item)) for item in optims]
        check_keyed(optimizer for _, optimizer in pairs)
        for key, _ in pairs:
            if not isinstance(key, str):
                raise ValueError(f"The key of an optimizer is a string, got {key!r}")
        self._optims: list[KeyedPair] = pairs
        self._check_apart()
        self._own_defaults[FLAG] = self._saving()

    def _parts(self) -> list[KeyedPair]:
        return self._optims

    @property
    def optimizers(self) -> list[KeyedPair]:
        """The optimizers with their keys; ``""`` for one without."""
        return self._optims

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Whether groups are saved, as the optimizers inside say."""
        self._own_defaults[FLAG] = self._saving()
        return self._own_defaults

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """Put the key of an optimizer in front of that of a parameter."""
        return prepend(name, opt_key)

    def __repr__(self) -> str:
        return ",".join(f"{key}: {optimizer!r}" for key, optimizer in self._optims)

    def step(self, closure: Any = None) -> Any:
        """Evaluate the closure once, step every optimizer with those gradients, and return the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for _, optimizer in self._optims:
            optimizer.step(closure=None)
        return loss

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group to the optimizer whose key is in front of all keys of its parameters.

        Raises:
            ValueError: no optimizer, or several; add it to the one that is meant.
        """
        params, options = take_apart(param_group, self.params)
        fits = []
        for prefix, optimizer in self._optims:
            named = {strip(key, prefix): param for key, param in params.items()}
            if None not in named and (prefix or len(self._optims) == 1):
                fits.append((optimizer, named))
        if len(fits) != 1:
            raise ValueError(
                f"The keys {list(params)} do not tell which of the combined optimizers is meant: "
                "add the group to that optimizer"
            )
        optimizer, named = fits[0]
        optimizer.add_param_group({"params": named, **options})

    def _check_apart(self) -> None:
        everything = [
            (prepend(name, prefix) if prefix else name, param)
            for prefix, optimizer in self._optims
            for name, param in optimizer.params.items()
        ]
        if len(dict(everything)) == len({id(param) for _, param in everything}) == len(everything):
            return
        keys: set[str] = set()
        owners: dict[int, str] = {}
        for key, param in everything:
            if key in keys:
                raise ValueError(f"Duplicate param key {key}")
            if id(param) in owners:
                raise ValueError(f"One parameter has two optimizers: {owners[id(param)]} and {key}")
            keys.add(key)
            owners[id(param)] = key

    def _saving(self) -> bool:
        flags = [saves_groups(optimizer) for _, optimizer in self._optims]
        if not flags:
            return bool(self._own_defaults[FLAG])
        if len(set(flags)) == 2:
            some = [f"{n} ({self._optims[n][0]!r})" for n, flag in enumerate(flags) if flag]
            raise ValueError(
                f"Of the combined optimizers only {', '.join(some)} save their groups: "
                "call save_param_groups with the same value on all of them"
            )
        return flags[0]

    def _save_parts(self) -> dict[str, Any]:
        self._check_apart()
        saves = self._saving()
        saved: dict[str, Any] = {"state": {}}
        groups: list[Any] = []
        for prefix, optimizer in self._optims:
            part = dict(optimizer.state_dict())
            _add(saved["state"], part.pop("state"), prefix)
            for group in part.pop("param_groups", ()):
                groups.append({**group, "params": sorted(prepend(name, prefix) for name in group["params"])})
            _add(saved, part, prefix)  # what hooks of an optimizer have added
        return {**saved, "param_groups": groups} if saves else saved

    def _portions(self, state_dict: Mapping[str, Any]) -> list[Portion]:
        self._check_apart()
        parts: list[dict[str, Any]] = [{"state": {}} for _ in self._optims]
        for (prefix, _), part in zip(self._optims, parts, strict=True):
            for key in state_dict.keys() - {"state", "param_groups"}:
                name = strip(key, prefix)
                if name is not None:
                    part[name] = state_dict[key]
        for key, entry in state_dict["state"].items():
            number, name = self._owner(key)
            parts[number]["state"][name] = entry
        if self._saving() and "param_groups" in state_dict:
            self._deal_groups(parts, state_dict["param_groups"])
        return [(prefix, opt, part) for (prefix, opt), part in zip(self._optims, parts, strict=True)]

    def _owner(self, key: str) -> tuple[int, str]:
        """Return the number of the optimizer that has a parameter, or whose key is in front; and its name."""
        best: tuple[Any, ...] = ()
        for number, (prefix, optimizer) in enumerate(self._optims):
            name = strip(key, prefix)
            if name is not None:
                best = max(best, (name in optimizer.params, len(prefix), number, name))
        if not best:
            raise ValueError(f"None of the combined optimizers has the parameter {key}")
        return best[2], best[3]

    def _deal_groups(self, parts: list[dict[str, Any]], groups: Any) -> None:
        keys = keys_by_id(self.params)
        check_groups(self.param_groups, groups, keys, Load())
        waiting = by_keys(groups)
        for (prefix, optimizer), part in zip(self._optims, parts, strict=True):
            part["param_groups"] = []
            for group in optimizer.param_groups:
                names = keys_of(group, keys)
                saved = waiting[tuple(names)].pop(0)
                part["param_groups"].append({**saved, "params": [strip(name, prefix) for name in names]})


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2


def _add(into: dict[str, Any], part: Mapping[str, Any], prefix: str) -> None:
    for name, value in part.items():
        key = prepend(name, prefix) if prefix else name
        if key in into:
            raise ValueError(f"Duplicate param key {key}")
        into[key] = value
