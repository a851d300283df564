"""The keyed optimizer: its state is saved and loaded by the keys of its parameters.

For subclasses, the wrappers of this package among them:

- `params`, `state`, `param_groups` and `defaults` may be properties; nothing here writes to them but
  what their names promise, and `KeyedOptimizer.__init__` need not be called.
- `_save` returns what `state_dict` does, without hooks. `_check` returns a :class:`Load` of what is to
  be written, or raises a ValueError; it writes nothing. `members.ready_load` does it for any optimizer.
- Each optimizer of a tree is told by itself after a load; so `post_load_state_dict` of one that holds
  others hands a call on only where a user has made it, while `_loading` is False.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableSequence
from typing import Any

import torch

from keyedopt.fused.keyed.checks import check_state
from keyedopt.fused.keyed.groups import check_groups, check_keys, show_groups, take_apart
from keyedopt.fused.keyed.hooked import Hooked
from keyedopt.fused.keyed.initialize import initialize
from keyedopt.fused.keyed.loading import Load
from keyedopt.fused.keyed.values import kind, layouts, show_all

FLAG = "_save_param_groups"


class KeyedOptimizer(Hooked):
    """An optimizer whose parameters have keys.

    State has to be complete after a parameter's first step, and is then loaded in place: all of it, or
    nothing where something does not fit.

    Args:
        params: parameters by key; the mapping is copied.
        state: state by parameter, kept by reference.
        param_groups: the groups, kept by reference. They are saved and loaded only after
            ``save_param_groups(True)``.

    Raises:
        ValueError: two keys for one parameter, or state for what is none.
    """

    _loading = False
    _layouts: dict[str, tuple[Any, ...]] | None = None
    _seen: tuple[list[int], list[tuple[Any, ...]]] | None = None

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        state: Mapping[Any, Any],
        param_groups: Collection[Mapping[str, Any]],
    ) -> None:
        check_one_to_one(params, state)
        self.params = dict(params)
        self.state = state  # type: ignore[assignment]  # any mapping
        self.param_groups = param_groups  # type: ignore[assignment]
        self.defaults = {FLAG: False}

    def state_dict(self) -> dict[str, Any]:
        """Return the state by key: the live tensors, and stateful objects as their state."""
        return self._save_with_hooks(self._save)

    def _save(self) -> dict[str, Any]:
        keys = self._keys()
        saved: dict[str, Any] = {"state": self._by_key(keys, show_all(self.state.values()))}
        if self.defaults[FLAG]:
            saved["param_groups"] = show_groups(self.param_groups, keys)
        return saved

    def _keys(self) -> dict[int, str]:
        """Return the key of each parameter by its identity; all that is optimized has to have one."""
        keys = keys_by_id(self.params)
        check_keys(self.param_groups, keys)
        return keys

    def _by_key(self, keys: Mapping[int, str], entries: Iterable[Any]) -> dict[str, Any]:
        """Name the entries of the state by the keys of their parameters."""
        try:
            return dict(zip(map(keys.__getitem__, map(id, self.state)), entries, strict=True))
        except KeyError:
            stranger = next(param for param in self.state if id(param) not in keys)
            raise ValueError(f"The state of {kind(stranger)} {stranger!r} has no key") from None

    def save_param_groups(self, save: bool) -> None:
        """Choose whether groups are saved and loaded."""
        self.defaults[FLAG] = save

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Fill the state in place.

        Raises:
            ValueError: something does not fit; nothing has been written.
        """
        self._ready_load(state_dict).run()

    def _ready_load(self, state_dict: Mapping[str, Any]) -> Load:
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"A state dict is a mapping, got {kind(state_dict)}")
        given = self._hooks_before_load(state_dict)
        if not isinstance(given, Mapping) or not isinstance(given.get("state"), Mapping):
            raise ValueError(f"A state dict is a mapping with a mapping 'state', got {kind(given)}")
        load = self._check(given)
        load.afterwards.append(self._after_load)
        return load

    def _check(self, state_dict: Mapping[str, Any]) -> Load:
        load, keys = Load(), self._keys()
        check_state(self._by_key(keys, self.state.values()), state_dict["state"], load)
        if self.defaults[FLAG]:
            if "param_groups" not in state_dict:
                raise ValueError("Expected 'param_groups' beside 'state', got none")
            check_groups(self.param_groups, state_dict["param_groups"], keys, load)
        return load

    def _after_load(self) -> None:
        self._loading = True
        try:
            self.post_load_state_dict()
        finally:
            self._loading = False
        self._hooks_after_load()

    def post_load_state_dict(self) -> None:
        """Follow up on a load; for subclasses."""

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Create the state of a first step, and gradients of zero; change nothing else.

        Args:
            sparse_grad_parameter_names: keys of the parameters whose gradient is to be sparse.
        """
        initialize(self, sparse_grad_parameter_names or ())
        self._after_step()

    def _after_step(self) -> None:
        """See that state has the keys it had after the first step; else it could not be loaded in place."""
        now = list(map(id, self.state)), layouts(self.state.values())
        if now == self._seen:
            return
        first = self._layouts = {} if self._layouts is None else self._layouts
        at = dict(zip(*now, strict=True))
        for key, param in self.params.items():
            has = at.get(id(param))
            if has and set(has) != set(first.setdefault(key, has)):
                changed = sorted(map(str, set(has) ^ set(first[key])))
                raise RuntimeError(
                    f"The state of {key} has to be complete after its first step, but of its keys "
                    f"these came or went later: {changed}"
                )
        self._seen = now

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_seen": None}  # identities are others in a copy

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group whose parameters have keys.

        Args:
            param_group: options, and under ``"params"`` a mapping from key to parameter, or pairs of
                them as ``named_parameters()`` yields.

        Raises:
            ValueError: a parameter without key, or one that is there already, or its key.
        """
        params, options = take_apart(param_group, self.params)
        self._append_group(params, options)
        self.params.update(params)

    def _append_group(self, params: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
        if not isinstance(self.param_groups, MutableSequence):
            raise ValueError("The groups of this optimizer are not a list that can grow")
        self.param_groups.append({"params": list(params.values()), **options})


def keys_by_id(params: Mapping[str, Any]) -> dict[int, str]:
    """Return the key of each parameter by its identity."""
    return dict(zip(map(id, params.values()), params, strict=True))


def check_one_to_one(params: Mapping[str, Any], state: Mapping[Any, Any]) -> None:
    """Check that no parameter has two keys, and that state is mappings, and of parameters alone."""
    keys = keys_by_id(params)
    strangers = [param for param in state if id(param) not in keys]
    if strangers:
        raise ValueError(f"All state keys must be params. The following keys are not: {strangers}.")
    if len(keys) < len(params):
        key, last = next((key, keys[id(p)]) for key, p in params.items() if keys[id(p)] != key)
        raise ValueError(f"One parameter has two keys: {key} and {last}")
    for param, entry in state.items():
        if not isinstance(entry, Mapping):
            raise ValueError(f"The state of {keys[id(param)]} is no mapping but {kind(entry)}")
