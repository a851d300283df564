"""Sound fault-tolerant and semi-synchronous optimizers, unlike the reference where documents leave room.

The one evaluates a closure itself before the manager is asked, keeps what it wraps under other names,
shows copies of lists and mappings that hold the live objects, and returns whether it stepped. The other
shows groups and state in another order, as a collection and a mapping made at each look.
"""

from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import torch
from sound_keyed import Groups, backwards

from keyedopt import reference
from keyedopt.reference.fault_tolerance import check_no_backward_updates


class FaultTolerantOptimizer(reference.FaultTolerantOptimizer):
    def __init__(self, manager: Any, optim: Any) -> None:
        if not hasattr(manager, "should_commit") or not isinstance(optim, torch.optim.Optimizer):
            raise TypeError("a manager, and then an optimizer")
        check_no_backward_updates(optim)
        self._votes, self._inner = manager, optim

    @property
    def manager(self) -> Any:
        raise AttributeError("its name is its own")

    @property
    def optim(self) -> Any:
        return self._inner

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._votes.start_quorum()
        for group in self._inner.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad = None if set_to_none else torch.zeros_like(param.grad)

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        if self._votes.should_commit():
            self._inner.step()
            return True
        return False

    @property
    def state(self) -> Any:
        return MappingProxyType(self._inner.state)

    @property
    def param_groups(self) -> Any:
        return list(self._inner.param_groups)

    def state_dict(self) -> Any:
        return OrderedDict(super().state_dict())


class SemisyncOptimizer(reference.SemisyncOptimizer):
    @property
    def param_groups(self) -> Any:
        return Groups(reversed(list(super().param_groups)))

    @property
    def state(self) -> Any:
        return MappingProxyType(dict(reversed(list(super().state.items()))))

    def _save(self) -> Any:
        return backwards(super()._save())
