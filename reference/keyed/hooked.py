"""An optimizer of torch on which every hook works, whatever its class's constructor does."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Self, TypeVar

from torch import optim

R = TypeVar("R")
HOOKS = (
    "step_pre",
    "step_post",
    "state_dict_pre",
    "state_dict_post",
    "load_state_dict_pre",
    "load_state_dict_post",
)


class Hooked(optim.Optimizer):
    """Base of the keyed optimizer: its hooks, each of which fires once an event, and its copies."""

    _layouts: dict[str, frozenset[Any]]  # of each parameter's state, after its first step
    _in_step: list[None]  # not empty during a step; no flag, for Dynamo of torch 2.11 sets no attribute here

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make an instance on which every hook works, whatever its class's constructor does."""
        self = super().__new__(cls)
        for name in HOOKS:
            setattr(self, f"_optimizer_{name}_hooks", OrderedDict())
        self._layouts = {}
        self._in_step = []
        self._patch_step_function()
        return self

    @staticmethod
    def profile_hook_step(func: Callable[..., R]) -> Callable[..., R]:
        """Run the step hooks around `func`, once a step, and check the state afterwards."""
        hooked = optim.Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: Hooked, *args: Any, **kwargs: Any) -> R:
            if self._in_step:  # the step of a subclass, calling that of its base
                return func(self, *args, **kwargs)
            self._in_step.append(None)
            try:
                result = hooked(self, *args, **kwargs)
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
        """See, after a step, that the state is what it has to be."""

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler puts a `step` on the instance that is bound to this very optimizer: a copy
        # that kept it would step the original.
        kept = {key: value for key, value in self.__dict__.items() if key != "step"}
        return {**kept, "_in_step": []}
