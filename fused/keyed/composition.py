"""Keyed optimizers that hold others: what they share, and the wrapper of one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from keyedopt.fused.keyed.base import FLAG, KeyedOptimizer
from keyedopt.fused.keyed.checks import check_entry
from keyedopt.fused.keyed.foreign_members import check_keyed, ready_load
from keyedopt.fused.keyed.groups import take_apart
from keyedopt.fused.keyed.loading import Load
from keyedopt.fused.keyed.values import show
from keyedopt.fused.keyed.views import Joined, prepend, strip

#: The prefix of the keys of an optimizer, the optimizer, and what it is to load.
Portion = tuple[str, Any, Mapping[str, Any]]


class Composition(KeyedOptimizer):
    """Base of keyed optimizers that hold others. Nothing of theirs is copied: it is looked up at every use.

    One may have entries of its own: ``self.params[key] = param`` and ``self.state[param] = {...}``.
    """

    def __init__(self) -> None:
        self._own_params: dict[str, Any] = {}
        self._own_state: dict[Any, Any] = {}
        self._own_defaults: dict[str, Any] = {FLAG: False}

    def _parts(self) -> Sequence[tuple[str, Any]]:
        """Return the optimizers inside, each with the prefix of its parameters' keys."""
        raise NotImplementedError

    def _all_params(self) -> list[tuple[str, Any]]:
        return [*((prefix, part.params) for prefix, part in self._parts()), ("", self._own_params)]

    def _all_state(self) -> list[tuple[str, Any]]:
        return [*(("", part.state) for _, part in self._parts()), ("", self._own_state)]

    @property
    def params(self) -> MutableMapping[str, Any]:  # type: ignore[override]
        """All parameters by key."""
        return Joined(self._all_params)

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]
        """All state by parameter."""
        return Joined(self._all_state)

    @property
    def param_groups(self) -> Collection[Any]:  # type: ignore[override]
        """The very groups of the optimizers inside."""
        return [group for _, part in self._parts() for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Set all gradients to zero, or with `set_to_none` to None."""
        for _, part in self._parts():
            part.zero_grad(set_to_none=set_to_none)

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Let every optimizer inside create its state; see `KeyedOptimizer.init_state`."""
        for prefix, part in self._parts():
            names = {strip(name, prefix) for name in sparse_grad_parameter_names or ()} - {None}
            part.init_state(None if sparse_grad_parameter_names is None else names)

    def _after_step(self) -> None:
        """Do nothing: the optimizers inside look after their own state."""

    def save_param_groups(self, save: bool) -> None:
        """Choose for all optimizers inside whether groups are saved and loaded."""
        for _, part in self._parts():
            part.save_param_groups(save)
        self._own_defaults[FLAG] = save

    def set_optimizer_step(self, step: int) -> None:
        """Hand a step count to the optimizers inside that take one."""
        self._pass_on("set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Hand options to the optimizers inside that take them."""
        self._pass_on("update_hyper_parameters", params_dict)

    def scratch_buffers(self) -> tuple[torch.Tensor, ...]:
        """List memory of the optimizers inside that is no state."""
        return tuple(buffer for buffers in self._pass_on("scratch_buffers") for buffer in buffers)

    def _pass_on(self, name: str, *args: Any) -> list[Any]:
        return [getattr(part, name)(*args) for _, part in self._parts() if hasattr(part, name)]

    def _own_entries(self) -> dict[str, Any]:
        own = self._own_params.items()
        return {key: self._own_state[param] for key, param in own if param in self._own_state}

    def _save(self) -> dict[str, Any]:
        saved, own = self._save_parts(), self._own_entries()
        if not own:
            return saved
        for key in own:
            if key in saved["state"]:
                raise ValueError(f"Duplicate param key {key}")
        return {**saved, "state": {**saved["state"], **{key: show(entry) for key, entry in own.items()}}}

    def _save_parts(self) -> dict[str, Any]:
        raise NotImplementedError

    def _check(self, state_dict: Mapping[str, Any]) -> Load:
        load = Load()
        own = self._own_entries()
        if own:
            state = dict(state_dict["state"])
            for key, entry in own.items():
                if key not in state:
                    raise ValueError(f"Parameter {key} not found: got {sorted(state, key=str)}")
                check_entry(entry, state.pop(key), (key,), load)
            state_dict = {**state_dict, "state": state}
        for prefix, optimizer, part in self._portions(state_dict):
            where = f" (in the optimizer {prefix!r})" if prefix else ""
            try:
                found = ready_load(optimizer, part)
            except ValueError as error:
                raise ValueError(f"{error}{where}") from error
            found.explain(where)
            found.objects = [
                (target, new, (prepend(path[0] if path else "", prefix), *path[1:]))
                for target, new, path in found.objects
            ]
            load.extend(found)
        return load

    def _portions(self, state_dict: Mapping[str, Any]) -> Sequence[Portion]:
        """Deal what is to be loaded to the optimizers inside."""
        raise NotImplementedError

    def post_load_state_dict(self) -> None:
        """Tell the optimizers inside, unless a load does."""
        if not self._loading:
            for _, part in self._parts():
                part.post_load_state_dict()


class OptimizerWrapper(Composition):
    """A keyed optimizer around another, which it resembles in everything; the base of clipping and warmup.

    A subclass overrides `step`, and calls ``super().step(closure)`` for the step of the wrapped optimizer.

    Args:
        optimizer: the keyed optimizer to wrap, perhaps of another library.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        check_keyed([optimizer])
        super().__init__()
        self._optimizer = optimizer

    def _parts(self) -> list[tuple[str, Any]]:
        return [("", self._optimizer)]

    @property
    def param_groups(self) -> Collection[Mapping[str, Any]]:  # type: ignore[override]
        """The groups of the wrapped optimizer."""
        return self._optimizer.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the wrapped optimizer."""
        return getattr(self._optimizer, "defaults", self._own_defaults)

    def __repr__(self) -> str:
        return repr(self._optimizer)

    def step(self, closure: Any = None) -> Any:
        """Step the wrapped optimizer and return what it returns."""
        return self._optimizer.step(closure=closure)

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group to the wrapped optimizer; see `KeyedOptimizer.add_param_group`."""
        if self._own_params:  # the wrapped optimizer cannot know that these keys are taken
            take_apart(param_group, self._own_params)
        self._optimizer.add_param_group(param_group)

    def _save_parts(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def _portions(self, state_dict: Mapping[str, Any]) -> list[Portion]:
        return [("", self._optimizer, state_dict)]
