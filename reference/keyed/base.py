"""The keyed optimizer: an optimizer whose state is named by the keys of its parameters.

For whoever writes a wrapper or another subclass:

- Shared code only reads `self.params`, `self.state`, `self.param_groups` and `self.defaults`; a
  subclass may make any of them a property that looks at what is live elsewhere, and then does not
  call `KeyedOptimizer.__init__`. Hooks work all the same: they are set up when an instance is made.
- Override :meth:`_save` to change what `state_dict` returns; the hooks are run around it.
- A load is checked by :meth:`_check_load`, which returns what is to be written as a
  :class:`PendingLoad` or raises a ValueError, and writes nothing. It is carried out by
  :meth:`_apply_load`. A wrapper's `_check_load` checks its own entry, then extends its pending
  load with that of :func:`prepare_load` on each optimizer that it holds: hooks, checks and
  `post_load_state_dict` of the members are all in there, and all members are checked before
  anything is written. `prepare_load` takes keyed optimizers of other libraries too, as objects
  that may refuse and are then rolled back.
- During a load every optimizer in a tree is told by itself, so a wrapper's `post_load_state_dict`
  passes the call on only while `self._loading` is False, that is, when a user calls it.
- `step` may call `super().step()`: the hooks fire once, at the outermost call.
- :meth:`_dummy_step` is what `init_state` runs: a step without hooks.
- :meth:`_append_group` is given a group whose parameters have been checked, with and without keys.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, MutableSequence
from typing import Any, Self, TypeVar

import torch
from torch import optim

from keyedopt.reference.keyed.groups import check_groups, group_keys, keyed_parameters, save_groups
from keyedopt.reference.keyed.initialize import initialize
from keyedopt.reference.keyed.pending import PendingLoad
from keyedopt.reference.keyed.state import check_entry, extract, layout
from keyedopt.reference.keyed.values import kind

R = TypeVar("R")
HOOKS = (
    "step_pre",
    "step_post",
    "state_dict_pre",
    "state_dict_post",
    "load_state_dict_pre",
    "load_state_dict_post",
)


class KeyedOptimizer(optim.Optimizer):
    """An optimizer whose state is saved and loaded by the key of each parameter.

    Stricter than `torch.optim.Optimizer`: state has to be complete after a parameter's first step,
    and is then loaded in place; all of a load is checked before any of it is written.

    Args:
        params: the parameters by key. The mapping is copied, the tensors are not.
        state: state by parameter, kept by reference.
        param_groups: the groups, kept by reference. They are saved and loaded only after
            `save_param_groups(True)`, for groups are usually set anew at each start, and not all
            parameters are present on all ranks.
    """

    _layouts: dict[str, frozenset[Any]]  # of each parameter's state, after its first step
    _in_step = False
    _loading = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make an instance on which every hook works, whatever its class's constructor does."""
        self = super().__new__(cls)
        for name in HOOKS:
            setattr(self, f"_optimizer_{name}_hooks", OrderedDict())
        self._layouts = {}
        self._patch_step_function()
        return self

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

    # Saving

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
            "state": {keys[id(param)]: extract(entry) for param, entry in self.state.items()}
        }
        if self.defaults["_save_param_groups"]:
            saved["param_groups"] = save_groups(self.param_groups, keys)
        return saved

    def save_param_groups(self, save: bool) -> None:
        """Choose whether groups are part of what is saved and loaded."""
        self.defaults["_save_param_groups"] = save

    def _keys(self) -> dict[int, str]:
        """Map parameters, by identity, to keys; whatever is optimized has to have one."""
        keys = {id(param): key for key, param in self.params.items()}
        for number, group in enumerate(self.param_groups):
            group_keys(group, number, keys)
        for param in self.state:
            if id(param) not in keys:
                raise ValueError(f"The state of {kind(param)} {param!r} has no key")
        return keys

    # Loading

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Fill the live state from `state_dict`, in place and all or nothing.

        Raises:
            ValueError: something does not fit; then nothing at all has been written.
        """
        self._apply_load(self._prepare_load(state_dict))

    def _prepare_load(self, state_dict: Mapping[str, Any]) -> PendingLoad:
        """Run the pre-hooks and the check; what follows a load is part of what is pending."""
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
        new, pending, keys = state_dict["state"], PendingLoad(), self._keys()
        if not isinstance(new, Mapping):
            raise ValueError(f"The state is a mapping by parameter key, got {kind(new)}")
        live = {keys[id(param)]: entry for param, entry in self.state.items()}
        if len(live) != len(new):
            raise ValueError(
                f"Different parameter count: {len(live)} vs {len(new)}: "
                f"expected {sorted(live)}, got {sorted(new, key=str)}"
            )
        for key in live:
            if key not in new:
                raise ValueError(f"Parameter {key} not found: got {sorted(new, key=str)}")
        for key, entry in live.items():
            check_entry(entry, new[key], [key], pending)
        if self.defaults["_save_param_groups"]:
            if "param_groups" not in state_dict:
                raise ValueError("Expected 'param_groups' beside 'state', got none")
            check_groups(self.param_groups, state_dict["param_groups"], keys, pending)
        return pending

    def _apply_load(self, pending: PendingLoad) -> None:
        pending.run()

    def _after_load(self) -> None:
        self._loading = True
        try:
            self.post_load_state_dict()
        finally:
            self._loading = False
        for post_hook in list(self._optimizer_load_state_dict_post_hooks.values()):
            post_hook(self)

    def post_load_state_dict(self) -> None:
        """Do what has to be done after each load; for subclasses."""

    # Stepping

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Create the state that the first step would create, and zero gradients; nothing else.

        Args:
            sparse_grad_parameter_names: keys of the parameters that get a sparse zero gradient.
        """
        initialize(self, sparse_grad_parameter_names or set())
        self._check_complete()

    def _dummy_step(self) -> None:
        self._in_step = True
        try:
            type(self).step(self, closure=None)
        finally:
            self._in_step = False

    @staticmethod
    def profile_hook_step(func: Callable[..., R]) -> Callable[..., R]:
        """Run the step hooks around `func`, once a step, and check the state afterwards."""
        hooked = optim.Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: KeyedOptimizer, *args: Any, **kwargs: Any) -> R:
            if self._in_step:  # the step of a subclass, calling that of its base
                return func(self, *args, **kwargs)
            self._in_step = True
            try:
                result = hooked(self, *args, **kwargs)
            finally:
                self._in_step = False
            self._check_complete()
            return result

        return step

    def _check_complete(self) -> None:
        """See that no parameter's state has other keys than after its first step.

        State that comes later could not be loaded in place: a checkpoint of the first step and
        one of the second would not fit each other.
        """
        for key, param in self.params.items():
            now = layout(self.state[param]) if param in self.state else frozenset()
            first = self._layouts.setdefault(key, now) if now else now
            if now != first:
                changed = sorted(".".join(map(str, path)) for path in now ^ first)
                raise RuntimeError(
                    f"The state of {key} has to be complete after its first step, but these of "
                    f"its keys came or went later: {changed}"
                )

    # Groups

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group whose parameters come with their keys.

        Args:
            param_group: options, and under "params" a mapping from key to parameter or
                (key, parameter) pairs, as `named_parameters()` yields them.

        Raises:
            ValueError: a parameter without key, or a key or parameter that is already there.
        """
        params, options = keyed_parameters(param_group, self.params)
        self._append_group(params, options)

    def _append_group(self, params: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
        if not isinstance(self.param_groups, MutableSequence):
            raise ValueError("The groups of this optimizer are not a list that can grow")
        self.param_groups.append({"params": list(params.values()), **options})
        self.params.update(params)

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler puts a `step` on the instance that is bound to this very optimizer: a copy
        # that kept it would step the original.
        return {key: value for key, value in self.__dict__.items() if key != "step"}


def prepare_load(optimizer: optim.Optimizer, state_dict: Mapping[str, Any]) -> PendingLoad:
    """Check a load of any keyed optimizer without writing anything.

    One of another library, or one with a `load_state_dict` of its own, decides for itself.
    """
    if getattr(type(optimizer), "load_state_dict", None) is KeyedOptimizer.load_state_dict:
        return optimizer._prepare_load(state_dict)  # type: ignore[attr-defined,no-any-return]
    return PendingLoad(stateful=[(optimizer, state_dict, [])])


def check_construction(params: Mapping[str, torch.Tensor], state: Mapping[Any, Any]) -> None:
    """Check that keys and parameters are one to one, and that state belongs to parameters."""
    known = {id(param): key for key, param in params.items()}
    strangers = [key for key in state if id(key) not in known]
    if strangers:
        raise ValueError(f"All state keys must be params. The following keys are not: {strangers}.")
    for key, param in params.items():
        if known[id(param)] != key:
            raise ValueError(f"One parameter has two keys: {key} and {known[id(param)]}")
    for param, entry in state.items():
        if not isinstance(entry, Mapping):
            raise ValueError(f"The state of {known[id(param)]} is no mapping but {kind(entry)}")
