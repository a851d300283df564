"""An optimizer of torch whose hooks work, without a call of its constructor."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import optim

from keyedopt.fused.dense.step_hooks import surround

_EVENTS = ("step", "state_dict", "load_state_dict")


class Hooked(optim.Optimizer):
    """Base of the keyed optimizers: hooks of three events, each called once an event; copies keep them."""

    _stepping: list[None]  # not empty during a step; no flag, for Dynamo of torch 2.11 sets no attribute here

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make an instance that is ready for hooks: a subclass may leave torch's constructor out."""
        made = super().__new__(cls)
        for event in _EVENTS:
            for when in ("pre", "post"):
                setattr(made, f"_optimizer_{event}_{when}_hooks", OrderedDict())
        made._stepping = []
        made._patch_step_function()
        return made

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Surround a `step` by the hooks, but not one that another `step` calls."""
        with_hooks = surround(func)

        @functools.wraps(func)
        def step(self: Hooked, *args: Any, **kwargs: Any) -> Any:
            if self._stepping:
                return func(self, *args, **kwargs)
            self._stepping.append(None)
            try:
                result = with_hooks(self, *args, **kwargs)
            finally:
                self._stepping.clear()
            self._after_step()
            return result

        return step

    def _after_step(self) -> None:
        """Do what follows every step, the post-hooks included."""

    def _bare_step(self) -> None:
        """Step without hooks and without what follows a step."""
        self._stepping.append(None)
        try:
            type(self).step(self, closure=None)
        finally:
            self._stepping.clear()

    def _save_with_hooks(self, save: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        for hook in tuple(self._optimizer_state_dict_pre_hooks.values()):
            hook(self)
        saved = save()
        for changing in tuple(self._optimizer_state_dict_post_hooks.values()):
            changed = changing(self, saved)
            saved = saved if changed is None else changed
        return saved

    def _hooks_before_load(self, state_dict: Mapping[str, Any]) -> Any:
        """Return what the hooks make of it; they may change a shallow copy, or give another."""
        given: Any = dict(state_dict)
        for hook in tuple(self._optimizer_load_state_dict_pre_hooks.values()):
            changed = hook(self, given)
            given = given if changed is None else changed
        return given

    def _hooks_after_load(self) -> None:
        for hook in tuple(self._optimizer_load_state_dict_post_hooks.values()):
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler binds a `step` to this very instance: with it, a copy would step the original.
        kept = dict(self.__dict__)
        kept.pop("step", None)
        return {**kept, "_stepping": []}
