"""Combine several keyed optimizers into one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from keyedopt.reference.keyed.base import KeyedOptimizer
from keyedopt.reference.keyed.composition import Composition
from keyedopt.reference.keyed.foreign_members import FLAG, check_keyed, saves_groups
from keyedopt.reference.keyed.groups import check_groups, keyed_parameters, keys_by_id
from keyedopt.reference.keyed.pending import PendingLoad
from keyedopt.reference.keyed.portions import Portion, merge, rename_group, split_groups, split_state
from keyedopt.reference.keyed.replayed_closure import ReplayedClosure, needs_closure
from keyedopt.reference.keyed.views import prepend_key, strip_keys

KeyedPair = tuple[str, KeyedOptimizer]


class CombinedOptimizer(Composition):
    """Combine keyed optimizers, for example those of the dense and of the sparse part of a model.

    Args:
        optims: the optimizers, or pairs ``(key, optimizer)``. The key and a dot become the prefix of the keys
            of the optimizer's parameters.

    Raises:
        ValueError: two parameters would have one key, one parameter would belong to two optimizers, only
            some of the optimizers save their groups, or an optimizer is not a keyed optimizer.

    Source: torchrec.optim.keyed.CombinedOptimizer.

    >>> import torch
    >>> from keyedopt.reference import CombinedOptimizer, KeyedOptimizerWrapper
    >>> tower, table = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    >>> dense = KeyedOptimizerWrapper({"weight": tower}, torch.optim.Adam)
    >>> sparse = KeyedOptimizerWrapper({"t0.weight": table}, torch.optim.Adagrad)
    >>> both = CombinedOptimizer([("dense", dense), ("sparse", sparse)])
    >>> both.init_state()
    >>> list(both.state_dict()["state"])
    ['dense.weight', 'sparse.t0.weight']
    """

    def __init__(self, optims: Iterable[KeyedOptimizer | KeyedPair]) -> None:
        super().__init__()
        self._optims = [_pair(item) for item in optims]
        self._check_disjoint()
        self._own_defaults[FLAG] = bool(self._saves_groups())

    def _parts(self) -> list[KeyedPair]:
        return self._optims

    @property
    def optimizers(self) -> list[KeyedPair]:
        """Pairs of key and optimizer; the key is ``""`` if none was given."""
        return self._optims

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Whether groups are saved: the flag of the combined optimizers, if they have one."""
        saves = self._saves_groups()
        if saves is not None:
            self._own_defaults[FLAG] = saves
        return self._own_defaults

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """Return the key of a parameter with the key of its optimizer in front, and a dot between them.

        Args:
            name: the key of the parameter.
            opt_key: the key of the optimizer; if it is empty, the key of the parameter does not change.
        """
        return prepend_key(name, opt_key)

    def __repr__(self) -> str:
        return ",".join(f"{key}: {optimizer!r}" for key, optimizer in self._optims)

    def step(self, closure: Any = None) -> Any:
        """Evaluate the closure once, then step every optimizer on those gradients.

        An optimizer that evaluates its closure gets this evaluation first, and may ask for more.

        Returns:
            The loss, which the closure returned.

        Raises:
            TypeError: an optimizer needs a closure, and there is none; no optimizer has stepped.
        """
        loss = None
        if closure is None and any(needs_closure(optimizer) for _, optimizer in self._optims):
            raise TypeError("a combination with LBFGS needs a closure: call step(closure)")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for _, optimizer in self._optims:
            replayed = None if closure is None else ReplayedClosure(closure, loss, self, optimizer)
            optimizer.step(closure=replayed)
            if replayed is not None:
                replayed.restore()
        return loss

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group to the optimizer whose key is the prefix of all keys in the group.

        Raises:
            ValueError: no optimizer, or more than one, has such a key; add the group to the optimizer itself.
        """
        params, options = keyed_parameters(param_group, self.params, self.param_groups)
        fits = [
            (optimizer, dict(zip(strip_keys(params, prefix), params.values(), strict=False)))
            for prefix, optimizer in self._optims
            if (prefix or len(self._optims) == 1) and len(strip_keys(params, prefix)) == len(params)
        ]
        if len(fits) != 1:
            raise ValueError(
                f"The keys {list(params)} do not say which of the combined optimizers is meant: "
                "add the group to that optimizer"
            )
        optimizer, named = fits[0]
        optimizer.add_param_group({"params": named, **options})

    def _check_disjoint(self) -> None:
        keys: set[str] = set()
        owners: dict[int, str] = {}
        for prefix, optimizer in self._optims:
            for name, param in optimizer.params.items():
                key = prepend_key(name, prefix)
                if key in keys:
                    raise ValueError(f"Duplicate param key {key}")
                if id(param) in owners:
                    raise ValueError(f"One parameter has two optimizers: {owners[id(param)]} and {key}")
                keys.add(key)
                owners[id(param)] = key

    def _saves_groups(self) -> bool | None:
        """Return whether the optimizers save their groups; None if only their state dicts show this."""
        if not self._optims:
            return bool(self._own_defaults[FLAG])
        return self._common_flag([saves_groups(optimizer) for _, optimizer in self._optims])

    def _common_flag(self, saves: list[bool | None]) -> bool | None:
        """Return the flag of all optimizers that have one; raise ValueError if two flags differ."""
        flags = {f"{n} ({self._optims[n][0]!r})": flag for n, flag in enumerate(saves) if flag is not None}
        if len(set(flags.values())) > 1:
            saving = [name for name, flag in flags.items() if flag]
            raise ValueError(
                f"Of the combined optimizers only {', '.join(saving)} save their groups: "
                "call save_param_groups with the same value on all of them"
            )
        return any(flags.values()) if flags else None

    def _save_parts(self) -> dict[str, Any]:
        self._check_disjoint()
        self._saves_groups()  # raises before a hook fires
        state: dict[str, Any] = {}
        groups: list[Any] = []
        rest: dict[str, Any] = {}
        saves: list[bool | None] = []
        for prefix, optimizer in self._optims:
            part = dict(optimizer.state_dict())
            saves.append("param_groups" in part)
            merge(state, part.pop("state"), prefix)
            groups += [rename_group(group, prefix) for group in part.pop("param_groups", ())]
            merge(rest, part, prefix)  # any other entries that an optimizer saves
        found = self._common_flag(saves) if saves else self._own_defaults[FLAG]
        return {"state": state, **({"param_groups": groups} if found else {}), **rest}

    def _portions(self, state_dict: dict[str, Any]) -> list[Portion]:
        self._check_disjoint()
        portions = split_state(self._optims, state_dict)
        if self._saves_groups() is not False and "param_groups" in state_dict:
            groups, keys = state_dict["param_groups"], keys_by_id(self.params)
            check_groups(self.param_groups, groups, keys, PendingLoad())
            split_groups(portions, groups)
        return portions


def _pair(item: Any) -> KeyedPair:
    key, optimizer = item if isinstance(item, tuple) and len(item) == 2 else ("", item)
    check_keyed(optimizer)
    if not isinstance(key, str):
        raise ValueError(f"The key of an optimizer is a string, got {key!r}")
    return key, optimizer
