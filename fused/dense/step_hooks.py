"""Hooks of a step, without what they and a profiler cost where there are none."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def watched(optimizer: optim.Optimizer) -> bool:
    """Whether anybody looks at the steps of an optimizer: a hook, or a profiler."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    everywhere = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return bool(hooks or everywhere or torch._C._autograd._profiler_enabled())


def surround(func: Callable[..., Any]) -> Callable[..., Any]:
    """Do what torch does around a `step`: call hooks, and tell a profiler; without either, only step."""
    with_hooks = optim.Optimizer.profile_hook_step(func)

    @functools.wraps(func)
    def step(self: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return (with_hooks if watched(self) else func)(self, *args, **kwargs)

    return step
