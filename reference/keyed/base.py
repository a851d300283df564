"""The keyed optimizer: an optimizer whose state is saved under the keys of its parameters.

For authors of wrappers and other subclasses:

- Shared code only reads `params`, `state`, `param_groups` and `defaults`. A subclass may make any of
  them a property, and then does not call `KeyedOptimizer.__init__`; hooks still work.
- Override :meth:`_save` to change what `state_dict` returns; `state_dict` runs the hooks around it.
- :meth:`_check_load` returns the writes of a load as a :class:`PendingLoad` or raises a ValueError, and
  writes nothing; :meth:`PendingLoad.run` writes. A wrapper's `_check_load` checks its own entry, and extends
  its pending load by `prepare_load` (in `foreign_members.py`) of each member, so all members are checked
  before anything is written. A member of another library that refuses is rolled back.
- A load calls `post_load_state_dict` on each optimizer of a tree directly. So a wrapper's
  `post_load_state_dict` passes the call on only while `self._loading` is False: a user has called it.
- `step` may call `super().step()`: the hooks fire once. `init_state` runs :meth:`_dummy_step`.
- `bulk` shows, pairs and fills state. A package with faster code assigns its own `Bulk` to the class; it may
  compare values only when `PendingLoad.check` or `PendingLoad.run` asks for it, before the first write.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableSequence
from functools import partial
from typing import Any, ClassVar

import torch

from keyedopt.reference.keyed.agreement import agreement, shared_refusal
from keyedopt.reference.keyed.bulk import ONE_BY_ONE, Bulk
from keyedopt.reference.keyed.groups import (
    check_construction,
    check_groups,
    check_keys,
    keyed_parameters,
    save_groups,
)
from keyedopt.reference.keyed.hooked import Hooked
from keyedopt.reference.keyed.initialize import initialize
from keyedopt.reference.keyed.pending import PendingLoad
from keyedopt.reference.keyed.state import check_entries, check_layouts, check_parameter_keys
from keyedopt.reference.keyed.values import kind


class KeyedOptimizer(Hooked):
    """An optimizer whose state is saved and loaded by the key of each parameter.

    State must be complete after a parameter's first step. A load fills it in place, all or nothing.

    Args:
        params: the parameters by key. The mapping is copied, the tensors are not.
        state: state by parameter, kept by reference.
        param_groups: the groups, kept by reference. They are saved and loaded only after
            `save_param_groups(True)`.

    Raises:
        ValueError: a parameter has two keys, or state belongs to no parameter or is not a mapping.

    Source: torchrec.optim.keyed.KeyedOptimizer.

    >>> import torch
    >>> from keyedopt.reference import KeyedOptimizer
    >>> weight, momentum = torch.nn.Parameter(torch.ones(2)), torch.zeros(2)
    >>> state = {weight: {"momentum": momentum}}
    >>> optimizer = KeyedOptimizer({"weight": weight}, state, [{"params": [weight], "lr": 0.5}])
    >>> optimizer.load_state_dict({"state": {"weight": {"momentum": torch.tensor([3.0, 4.0])}}})
    >>> momentum.tolist()
    [3.0, 4.0]
    """

    bulk: ClassVar[Bulk] = ONE_BY_ONE
    _loading = False

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        state: Mapping[Any, Any],
        param_groups: Collection[Mapping[str, Any]],
    ) -> None:
        check_construction(params, state)
        self.params = dict(params)
        self.state = state  # type: ignore[assignment]  # any mapping, as the optimizer has it
        self.param_groups = param_groups  # type: ignore[assignment]
        self.defaults = {"_save_param_groups": False}

    def state_dict(self) -> dict[str, Any]:
        """Return state by key: live tensors, not copies, and stateful objects as their state."""
        for pre_hook in list(self._optimizer_state_dict_pre_hooks.values()):
            pre_hook(self)
        saved = self._save()
        for post_hook in list(self._optimizer_state_dict_post_hooks.values()):
            changed = post_hook(self, saved)
            saved = saved if changed is None else changed
        return saved

    def _save(self) -> dict[str, Any]:
        keys = self._keys()
        saved: dict[str, Any] = {
            "state": dict(zip(self._state_keys(keys), self.bulk.show(self.state.values()), strict=True))
        }
        if self.defaults["_save_param_groups"]:
            saved["param_groups"] = save_groups(self.param_groups, keys)
        return saved

    def save_param_groups(self, save: bool) -> None:
        """Choose by `save` whether groups are saved and loaded."""
        self.defaults["_save_param_groups"] = save

    def _keys(self) -> dict[int, str]:
        """Map the id of each parameter to its key; raise ValueError if a parameter has none."""
        keys = {id(param): key for key, param in self.params.items()}
        for number, group in enumerate(self.param_groups):
            check_keys(group, number, keys)
        return keys

    def _state_keys(self, keys: Mapping[int, str]) -> list[str]:
        """Return the key of each parameter that has state."""
        try:
            return [keys[id(param)] for param in self.state]
        except KeyError:
            param = next(param for param in self.state if id(param) not in keys)
            raise ValueError(f"The state of {kind(param)} {param!r} has no key") from None

    # Loading

    def load_state_dict(self, state_dict: Mapping[str, Any], process_group: Any = None) -> None:
        """Fill the live state from `state_dict`, in place and all or nothing, on all ranks that share state.

        The ranks of `process_group`, by default those over which state is sharded, load all or none. A
        ValueError says what does not match the live state, and on which ranks.
        """
        together = agreement(process_group, self.params.values(), self.state.values())
        with shared_refusal(together):
            pending = self._prepare_load(state_dict)
        pending.agreement = together
        pending.run()

    def _prepare_load(self, state_dict: Mapping[str, Any]) -> PendingLoad:
        """Run the pre-hooks and the check; the pending load ends with :meth:`_after_load`."""
        if not isinstance(state_dict, Mapping):
            raise ValueError(f"A state dict is a mapping, got {kind(state_dict)}")
        given = dict(state_dict)  # hooks may change their (shallow) copy
        for pre_hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            changed = pre_hook(self, given)
            given = given if changed is None else changed
        pending = self._check_load(given)
        pending.afterwards.append(self._after_load)
        return pending

    def _check_load(self, state_dict: Mapping[str, Any]) -> PendingLoad:
        if not isinstance(state_dict, Mapping) or "state" not in state_dict:
            raise ValueError(f"A state dict is a mapping with 'state', got {kind(state_dict)}")
        new, pending, keys = state_dict["state"], PendingLoad(bulk=self.bulk), self._keys()
        if not isinstance(new, Mapping):
            raise ValueError(f"The state is a mapping by parameter key, got {kind(new)}")
        live = dict(zip(self._state_keys(keys), self.state.values(), strict=True))
        paired = self.bulk.pair(live, new)
        if paired is not None:
            pending.unchecked.append((*paired, partial(check_entries, live, new)))
        else:
            check_parameter_keys(live, new)
            check_entries(live, new, pending)
        if self.defaults["_save_param_groups"]:
            if "param_groups" not in state_dict:
                raise ValueError("Expected 'param_groups' beside 'state', got none")
            check_groups(self.param_groups, state_dict["param_groups"], keys, pending)
        return pending

    def _after_load(self) -> None:
        self._loading = True
        try:
            self.post_load_state_dict()
        finally:
            self._loading = False
        for post_hook in list(self._optimizer_load_state_dict_post_hooks.values()):
            post_hook(self)

    def post_load_state_dict(self) -> None:
        """Do nothing; a subclass may update itself after each load."""

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Create the state that the first step would create, and zero gradients; change nothing else.

        The parameters with the keys in `sparse_grad_parameter_names` get sparse gradients. SGD knows its
        first step by the missing momentum buffer: with a buffer of zeros, dampening applies to it too.
        """
        initialize(self, sparse_grad_parameter_names or set())
        self._check_complete()

    def _check_complete(self) -> None:
        """Raise RuntimeError if the keys of a parameter's state have changed since its first step.

        Such state could not be loaded in place: the keys in checkpoints would differ.
        """
        now = [*map(id, self.state)], self.bulk.layouts(self.state.values())
        if now == self._checked_layouts:
            return
        entries = {key: self.state[param] for key, param in self.params.items() if param in self.state}
        check_layouts(self._layouts, {key: entries.get(key, {}) for key in self.params})
        self._checked_layouts = now

    # Groups

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group of parameters that are in no group; new ones come with their keys.

        Args:
            param_group: options, and "params": a mapping or pairs of key and parameter, or known parameters.

        Raises:
            ValueError: a parameter has no key, or the optimizer already has the key or the parameter.
        """
        params, options = keyed_parameters(param_group, self.params, self.param_groups)
        self._append_group(params, options)

    def _append_group(self, params: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
        if not isinstance(self.param_groups, MutableSequence):
            raise ValueError("The groups of this optimizer are not a list that can grow")
        self.param_groups.append({"params": list(params.values()), **options})
        self.params.update(params)
