"""The base class of wrappers and combinations: a keyed optimizer that contains other optimizers.

Parameters, state and groups are looked up in the optimizers inside at every use, never copied. So state that
they create or replace later is always visible, in any nesting.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from keyedopt.reference.keyed.base import KeyedOptimizer
from keyedopt.reference.keyed.foreign_members import FLAG, prepare_load
from keyedopt.reference.keyed.pending import PendingLoad
from keyedopt.reference.keyed.state import check_entry
from keyedopt.reference.keyed.values import extract, kind
from keyedopt.reference.keyed.views import JoinedView, prepend_key, strip_keys


class Composition(KeyedOptimizer):
    """Base of `OptimizerWrapper` and `CombinedOptimizer`.

    A composition may add entries of its own to those of the optimizers inside: a wrapper with state writes
    ``self.params[key] = param`` and ``self.state[param] = {...}``. These entries are saved and loaded, too.
    """

    def __init__(self) -> None:
        self._own_params: dict[str, Any] = {}
        self._own_state: dict[Any, Any] = {}
        self._own_defaults: dict[str, Any] = {FLAG: False}

    def _parts(self) -> Sequence[tuple[str, Any]]:
        """Return the optimizers inside, each with the prefix of its parameters' keys."""
        raise NotImplementedError

    # Views

    def _all_params(self) -> list[tuple[str, MutableMapping[str, Any]]]:
        inside = [(prefix, optimizer.params) for prefix, optimizer in self._parts()]
        return [*inside, ("", self._own_params)]

    def _all_state(self) -> list[tuple[str, MutableMapping[Any, Any]]]:
        return [*(("", optimizer.state) for _, optimizer in self._parts()), ("", self._own_state)]

    @property
    def params(self) -> MutableMapping[str, Any]:  # type: ignore[override]
        """All parameters by key."""
        return JoinedView(self._all_params)

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]
        """All state by parameter."""
        return JoinedView(self._all_state)

    @property
    def param_groups(self) -> Collection[Any]:  # type: ignore[override]
        """The groups of all optimizers inside: the mappings themselves, not copies."""
        return [group for _, optimizer in self._parts() for group in optimizer.param_groups]

    # Calls that go to the optimizers inside

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Set the gradients of all parameters to zero, or to None if `set_to_none`."""
        for _, optimizer in self._parts():
            optimizer.zero_grad(set_to_none=set_to_none)

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Let every optimizer inside initialize its state; see `KeyedOptimizer.init_state`."""
        names = sparse_grad_parameter_names
        for prefix, optimizer in self._parts():
            optimizer.init_state(None if names is None else set(strip_keys(names, prefix)))

    def _check_complete(self) -> None:
        """Do nothing: the optimizers inside check their own state after their steps."""

    def save_param_groups(self, save: bool) -> None:
        """Choose, for every optimizer inside, whether groups are saved and loaded."""
        for _, optimizer in self._parts():
            optimizer.save_param_groups(save)
        self._own_defaults[FLAG] = save

    def set_optimizer_step(self, step: int) -> None:
        """Pass a step count to the optimizers inside that have this method.

        Args:
            step: the number of steps that were taken, at least 0.
        """
        for _, optimizer in self._parts():
            if hasattr(optimizer, "set_optimizer_step"):
                optimizer.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Pass hyper-parameters, `params_dict`, to the optimizers inside that have this method."""
        for _, optimizer in self._parts():
            if hasattr(optimizer, "update_hyper_parameters"):
                optimizer.update_hyper_parameters(params_dict)

    def scratch_buffers(self) -> tuple[torch.Tensor, ...]:
        """Return the working memory of the optimizers inside that is not state."""
        inside = [optimizer for _, optimizer in self._parts() if hasattr(optimizer, "scratch_buffers")]
        return tuple(buffer for optimizer in inside for buffer in optimizer.scratch_buffers())

    # Saving and loading

    def _own_entries(self) -> dict[str, Any]:
        """Return the entries of the composition itself, by key."""
        named = self._own_params.items()
        return {key: self._own_state[param] for key, param in named if param in self._own_state}

    def _check_load(self, state_dict: Mapping[str, Any]) -> PendingLoad:
        if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("state"), Mapping):
            raise ValueError(f"A state dict is a mapping with 'state', got {kind(state_dict)}")
        state, pending = dict(state_dict["state"]), PendingLoad()
        for key, entry in self._own_entries().items():
            if key not in state:
                raise ValueError(f"Parameter {key} not found: got {sorted(state, key=str)}")
            check_entry(entry, state.pop(key), [key], pending)
        portions = self._portions({**state_dict, "state": state})
        for prefix, optimizer, part in portions:
            try:
                found = prepare_load(optimizer, part, alone=len(portions) == 1 and not prefix)
            except ValueError as error:
                raise ValueError(f"{error} (in the optimizer {prefix!r})" if prefix else error) from error
            for one in found.stateful:
                one.path = [prepend_key(one.path[0] if one.path else "", prefix), *one.path[1:]]
            pending.extend(found)
        return pending

    def _portions(self, state_dict: dict[str, Any]) -> Sequence[tuple[str, Any, dict[str, Any]]]:
        """Split a state dict: return key, optimizer and part for each optimizer inside."""
        raise NotImplementedError

    def _save(self) -> dict[str, Any]:
        saved = self._save_parts()
        own = {key: extract(entry) for key, entry in self._own_entries().items()}
        if not own:
            return saved
        for key in own:
            if key in saved["state"]:
                raise ValueError(f"Duplicate param key {key}")
        return {**saved, "state": {**saved["state"], **own}}

    def _save_parts(self) -> dict[str, Any]:
        raise NotImplementedError

    def post_load_state_dict(self) -> None:
        """Notify the optimizers inside, unless a load is running, which notifies each itself."""
        if not self._loading:
            for _, optimizer in self._parts():
                optimizer.post_load_state_dict()
