"""A torch optimizer on which every hook works, even if a subclass does not call the constructor."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

R = TypeVar("R")
HOOKS = (
    "step_pre",
    "step_post",
    "state_dict_pre",
    "state_dict_post",
    "load_state_dict_pre",
    "load_state_dict_post",
)


def has_observers(optimizer: optim.Optimizer) -> bool:
    """Return whether an optimizer has step hooks, or a profiler is running.

    Without both, `Optimizer.profile_hook_step` has no effect but costs several microseconds.
    """
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    everywhere = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return bool(hooks or everywhere or torch._C._autograd._profiler_enabled())


class Hooked(optim.Optimizer):
    """Base class of the keyed optimizer: hooks fire once per event, and copies keep them."""

    _layouts: dict[str, frozenset[Any]]  # of each parameter's state, after its first step
    _checked_layouts: tuple[list[int], list[Any]] | None  # when `_layouts` was compared last
    _in_step: list[None]  # not empty during a step; not a flag: Dynamo of torch 2.11 cannot set it here

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return an instance on which every hook works before its constructor has run."""
        self = super().__new__(cls)
        for name in HOOKS:
            setattr(self, f"_optimizer_{name}_hooks", OrderedDict())
        self._layouts = {}
        self._checked_layouts = None
        self._in_step = []
        self._patch_step_function()
        return self

    @staticmethod
    def profile_hook_step(func: Callable[..., R]) -> Callable[..., R]:
        """Run the step hooks around `func`, once per step, and check the state afterwards."""
        hooked = optim.Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: Hooked, *args: Any, **kwargs: Any) -> R:
            if self._in_step:  # a subclass calls the step of its base class
                return func(self, *args, **kwargs)
            self._in_step.append(None)
            try:
                result = (hooked if has_observers(self) else func)(self, *args, **kwargs)
            finally:
                self._in_step.clear()
            self._check_complete()
            return result

        return step

    def _dummy_step(self) -> None:
        self._in_step.append(None)
        try:
            type(self).step(self, closure=None)
        finally:
            self._in_step.clear()

    def _check_complete(self) -> None:
        """Do nothing; a subclass raises RuntimeError if the state is not valid after a step."""

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler sets an attribute `step` that is bound to this optimizer. A copy with this attribute
        # would step the original.
        kept = {key: value for key, value in self.__dict__.items() if key != "step"}
        return {**kept, "_checked_layouts": None, "_in_step": []}
