"""Step hooks without cost while there are no hooks and no profiler."""

import functools
from collections.abc import Callable
from typing import Any

from torch import optim

from keyedopt.reference.keyed.hooked import has_observers

__all__ = ["has_observers", "with_step_hooks"]


def with_step_hooks(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `step` with torch's hooks and profiler record, which cost nothing while unused."""
    with_hooks = optim.Optimizer.profile_hook_step(func)

    @functools.wraps(func)
    def step(self: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return (with_hooks if has_observers(self) else func)(self, *args, **kwargs)

    return step
